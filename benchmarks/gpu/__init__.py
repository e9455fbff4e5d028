"""The check of everything that only a GPU can show; `benchmarks/gpu_check.sh` starts it."""
