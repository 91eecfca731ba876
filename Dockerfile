# Two images: `server` offers envs and has no TensorFlow, `trainer` runs PPO on them.
#   docker build --target server --tag envserve-server .
#   docker build --target trainer --tag envserve-trainer .

FROM python:3.11-slim AS base
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 \
    PIP_NO_CACHE_DIR=1 \
    PYTHONUNBUFFERED=1
LABEL org.opencontainers.image.title="envserve" \
      org.opencontainers.image.description="Environment servers for reinforcement learning" \
      org.opencontainers.image.licenses="Apache-2.0"
# Runs land in ./runs, keys in /keys; a new volume mounted there takes over this owner,
# and this mode.
RUN useradd --create-home --home-dir /srv/envserve --uid 10001 envserve \
    && install --directory --owner envserve --group envserve /srv/envserve/runs \
    && install --directory --owner envserve --group envserve --mode 700 \
       /keys/server /keys/trainer
WORKDIR /opt/envserve
# What is installed depends on these files only, so an edit of the source, which comes
# after that, downloads nothing.
COPY pyproject.toml constraints.txt LICENSE README.md ./
RUN mkdir envserve ppo && touch envserve/__init__.py ppo/__init__.py \
    && pip install --constraint constraints.txt "setuptools>=77" .

FROM base AS server
RUN pip install --constraint constraints.txt ".[mujoco,page,metrics]"
COPY envserve envserve
COPY ppo ppo
RUN pip install --no-deps --no-build-isolation --force-reinstall .
WORKDIR /srv/envserve
# By number, so that an orchestrator can see that it is not root.
USER 10001:10001
EXPOSE 5555 9100
ENTRYPOINT ["envserve"]
CMD ["start"]
# Where `start` listens by default. SIGTERM drains, within the 10 s that Docker gives. Not
# --ready: once a trainer has all envs, there are none to have.
HEALTHCHECK --interval=15s --timeout=10s --start-period=60s --start-interval=1s \
    CMD ["envserve", "health", "--startup", "--live", "tcp://127.0.0.1:5555"]

FROM base AS trainer
RUN pip install --constraint constraints.txt ".[train-cpu,mujoco,video,plot,page,metrics]"
COPY envserve envserve
COPY ppo ppo
RUN pip install --no-deps --no-build-isolation --force-reinstall .
WORKDIR /srv/envserve
USER 10001:10001
EXPOSE 9101
ENTRYPOINT ["ppo"]
CMD ["--help"]
