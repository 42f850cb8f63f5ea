"""One module per command. Each reads its options, calls what does the work, and prints the result."""
