# Two images: `server` serves envs and contains no TensorFlow, `trainer` runs PPO on them.
#   docker build --target server --tag ghcr.io/envserve/envserve-server:0.2.0 .
#   docker build --target trainer --tag ghcr.io/envserve/envserve-trainer:0.2.0 .
# --build-arg COMMIT=$(git rev-parse --short HEAD) adds the commit to `envserve --version`.

FROM python:3.11-slim AS base
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 \
    PIP_NO_CACHE_DIR=1 \
    PYTHONUNBUFFERED=1
LABEL org.opencontainers.image.title="envserve" \
      org.opencontainers.image.source="https://github.com/envserve/envserve" \
      org.opencontainers.image.description="Environment servers for reinforcement learning" \
      org.opencontainers.image.licenses="Apache-2.0"
# Run folders are in ./runs, keys in /keys. A new volume that is mounted there inherits
# this owner and mode.
RUN useradd --create-home --home-dir /srv/envserve --uid 10001 envserve \
    && install --directory --owner envserve --group envserve /srv/envserve/runs \
    && install --directory --owner envserve --group envserve --mode 700 \
       /keys/server /keys/trainer /keys/local
WORKDIR /opt/envserve
# Dependencies are installed before the source is copied, so that a change of the source
# does not download them again.
COPY pyproject.toml setup.py constraints.txt LICENSE README.md ./
RUN mkdir envserve ppo && touch envserve/__init__.py ppo/__init__.py \
    && pip install --constraint constraints.txt "setuptools>=77" .

FROM base AS server
RUN pip install --constraint constraints.txt ".[mujoco,page,metrics]"
COPY envserve envserve
COPY ppo ppo
ARG COMMIT=""
RUN if [ -n "$COMMIT" ]; then echo "$COMMIT" > envserve/commit.txt; fi \
    && pip install --no-deps --no-build-isolation --force-reinstall .
WORKDIR /srv/envserve
# A number, so that an orchestrator can verify that the user is not root.
USER 10001:10001
EXPOSE 5555 9100
ENTRYPOINT ["envserve"]
CMD ["start"]
# The default address of `start`. --ready is omitted, because a server whose envs are all
# leased is healthy. SIGTERM drains the server within the 10 s that Docker waits.
HEALTHCHECK --interval=10s --timeout=10s --start-period=60s \
    CMD ["envserve", "health", "--startup", "--live", "tcp://127.0.0.1:5555"]

FROM base AS trainer
RUN pip install --constraint constraints.txt ".[train-cpu,mujoco,video,plot,page,metrics]"
COPY envserve envserve
COPY ppo ppo
ARG COMMIT=""
RUN if [ -n "$COMMIT" ]; then echo "$COMMIT" > envserve/commit.txt; fi \
    && pip install --no-deps --no-build-isolation --force-reinstall .
WORKDIR /srv/envserve
USER 10001:10001
EXPOSE 9101
ENTRYPOINT ["ppo"]
CMD ["--help"]
