"""`envserve bench`: one env, beside the machine's limit and Gymnasium's vector envs."""
