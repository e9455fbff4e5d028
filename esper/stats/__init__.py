"""Statistics of paired and single samples."""
