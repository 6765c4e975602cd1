"""Shared by the tests, the demo and the benches: local nodes, faults."""
