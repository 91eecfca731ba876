"""Cases without TensorFlow: ours, the machine's limit, and other projects."""
