"""Where and how training steps run: worker threads, CUDA streams, captured graphs, compiled segments."""
