"""How training steps are executed: worker threads, CUDA streams, captured graphs, compiled segments."""
