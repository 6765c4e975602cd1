from __future__ import annotations

from gemini_run.ids import shared_run_id


def test_nodes_that_were_given_no_run_id_come_to_the_same_one() -> None:
    command = ["train.py", "--lr", "0.1"]
    run = shared_run_id("node0:29500", command, {})
    assert run == shared_run_id("node0:29500", list(command), {"HOSTNAME": "other"})
    assert run.startswith("node0-29500-")
    others = [
        shared_run_id("node0:29501", command, {}),
        shared_run_id("node0:29500", ["train.py", "--lr", "0.2"], {}),
        shared_run_id("node0:29500", ["train.py", "--lr0.1"], {}),
        shared_run_id("node0:29500", command, {"SLURM_JOB_ID": "77"}),
    ]
    assert len({run, *others}) == 5
    assert others[-1].startswith("slurm-77-")
    assert others[-1] == shared_run_id("elsewhere:1", command, {"SLURM_JOB_ID": "77"}), "one batch job, one run"
