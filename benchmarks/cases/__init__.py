"""Cases without TensorFlow: envserve, bare loops over envs, and other projects."""
