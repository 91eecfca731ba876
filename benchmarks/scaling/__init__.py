"""The costs for a trainer of a batch that is spread over many servers."""
