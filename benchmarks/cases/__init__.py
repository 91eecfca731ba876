"""Cases without TensorFlow: envserve, the machine's limit, and other projects."""
