"""Execution of training steps: worker threads, CUDA streams, captured graphs, compiled segments."""
