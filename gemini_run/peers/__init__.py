"""Remote host memory: checkpoint process groups in the steady state, HTTP pulls in recovery."""
