"""A trainer's costs when it steps a batch that is spread over many servers."""
