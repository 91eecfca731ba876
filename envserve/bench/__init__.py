"""`envserve bench`: compare envserve with plain loops and Gymnasium's vector envs."""
