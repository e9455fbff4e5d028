"""Files that a run reads and writes: checkpoints, policies, grown hosts, run folders."""
