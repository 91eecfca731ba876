"""Records of what each env went through: in shared memory, and in repro files."""
