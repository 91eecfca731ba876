# Two images: `server` offers envs and has no TensorFlow, `trainer` runs PPO on them.
#   docker build --target server --tag envserve-server .
#   docker build --target trainer --tag envserve-trainer .

FROM python:3.11-slim AS base
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 \
    PIP_NO_CACHE_DIR=1 \
    PYTHONUNBUFFERED=1
# Runs land in ./runs, keys in /keys; a new volume mounted there takes over this owner,
# and this mode.
RUN useradd --create-home --home-dir /srv/envserve --uid 10001 envserve \
    && install --directory --owner envserve --group envserve /srv/envserve/runs \
    && install --directory --owner envserve --group envserve --mode 700 \
       /keys/server /keys/trainer
WORKDIR /opt/envserve
COPY pyproject.toml constraints.txt LICENSE README.md ./
COPY envserve envserve
COPY ppo ppo

FROM base AS server
RUN pip install --constraint constraints.txt ".[mujoco]"
WORKDIR /srv/envserve
USER envserve
ENTRYPOINT ["envserve"]
CMD ["start"]
# Where `start` listens by default. SIGTERM drains, within the 10 s that Docker gives.
HEALTHCHECK --interval=10s --timeout=10s --start-period=60s \
    CMD ["envserve", "health", "--startup", "--live", "tcp://127.0.0.1:5555"]

FROM base AS trainer
RUN pip install --constraint constraints.txt ".[train-cpu]"
WORKDIR /srv/envserve
USER envserve
ENTRYPOINT ["ppo"]
CMD ["--help"]
