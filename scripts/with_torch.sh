#!/bin/sh
# Runs tests on another torch than the project's own, everything else as it is installed:
#
#     scripts/with_torch.sh 2.6.0 [pytest arguments]
#
# Makes a virtual environment, kept for the next time, of some 5 GB (PyPI's torch comes with CUDA). It has torch of that
# version and takes the rest from the environment that is active now.
set -eu
version=${1:?usage: scripts/with_torch.sh VERSION [pytest arguments]}
shift
cd "$(dirname "$0")/.."
here=$(python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
bin=$(python -c 'import sysconfig; print(sysconfig.get_path("scripts"))')
other=${GEMINI_RUN_TORCHES:-$HOME/.cache/gemini-run-torches}/$version
if ! [ -e "$other/ready" ]; then
    python -m venv --clear "$other"
    "$other/bin/pip" install --quiet "torch==$version" numpy
    site=$("$other/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
    printf '%s\n' "$PWD" "$here" > "$site/rest.pth"
    for script in gemini-run torchrun moto_server; do
        sed "1s|.*|#!$other/bin/python|" "$bin/$script" > "$other/bin/$script"
        chmod +x "$other/bin/$script"
    done
    for program in etcd etcdctl juicefs; do
        [ ! -e "$bin/$program" ] || ln -sf "$bin/$program" "$other/bin/$program"
    done
    touch "$other/ready"
fi
"$other/bin/python" -c 'import torch, sys; print("torch", torch.__version__, "Python", sys.version.split()[0])'
PATH="$other/bin:$PATH" exec "$other/bin/python" -m pytest "$@"
