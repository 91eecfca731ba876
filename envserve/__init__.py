"""Environment servers for reinforcement learning.

Start at `envserve.client.BatchEnv`. This file stays empty on purpose: importing any
module runs it, and a worker process must load neither zmq nor asyncio.
"""
