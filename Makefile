# All targets need only python3 (3.11 or newer) and make. The packages of the integration
# tests (other trainers and envs, a browser, the docs) are in a separate environment.

PYTHON ?= python3
CONFIG ?= pendulum
ARGS ?=

VENV := .venv
INTEGRATION := .venv-integration
FLOOR := .venv-floor
PIP = $(@D)/bin/python scripts/pip_install.py
PINNED := pyproject.toml constraints.txt

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help train test test-integration test-doors test-floor examples bench chaos clean

help:
	@echo "make train [CONFIG=pendulum|cartpole|cheetah] [ARGS='--seed 1']"
	@echo "                            set up $(VENV) and train PPO on a Gymnasium task"
	@echo "make test [ARGS='-k name']  set up $(VENV) and run scripts/check (10 to 25 minutes)"
	@echo "make test-integration [ARGS='-k sb3']"
	@echo "                            set up $(INTEGRATION) and run the integration tests:"
	@echo "                            other trainers and envs, a browser, the docs, packages, and"
	@echo "                            tests that learn for minutes (15 to 30 minutes)"
	@echo "make test-floor             set up $(FLOOR) with the oldest supported versions of"
	@echo "                            Gymnasium, NumPy and MuJoCo, and test the vector envs"
	@echo "                            (2 minutes; Python 3.11 or 3.12)"
	@echo "make examples [ARGS=sb3_ppo]"
	@echo "                            set up $(INTEGRATION) and check that each example learns"
	@echo "                            its task, some while workers are killed (30 minutes)"
	@echo "make bench [ARGS='step --num-envs 64']"
	@echo "                            set up $(VENV) and compare BatchEnv with other vectorised"
	@echo "                            envs (the whole suite: 10 minutes)"
	@echo "make chaos [ARGS='kill --scale 0.01']"
	@echo "                            set up $(VENV), cause faults of every kind, and verify that"
	@echo "                            no transition is wrong (all cases: some hours)"
	@echo "make clean                  remove environments, caches and build files; keep runs/"
	@echo "PYTHON=python3.12           interpreter to create the environments with"

train: $(VENV)/.installed-train
	$(VENV)/bin/ppo train $(CONFIG) $(ARGS)
	@echo "Before you run envserve or ppo, activate the environment: . $(VENV)/bin/activate"

test: $(VENV)/.installed-dev
	scripts/check $(ARGS)

# pyproject.toml excludes these folders from all other runs of pytest.
test-integration: $(INTEGRATION)/.installed
	$(INTEGRATION)/bin/python -m pytest --numprocesses 2 tests/integration tests/learning $(ARGS)

# The former name, for existing scripts.
test-doors: test-integration

# Gymnasium 1.2 does not say why a wrapper rejects a space, and OpenCV needs NumPy 2.
test-floor: $(FLOOR)/.installed
	$(FLOOR)/bin/python -m pytest $(addprefix tests/envserve/test_,batch_env.py \
	  gymnasium_wrappers.py script_envs.py seeding.py vector_env.py wrapped_envs.py \
	  wrapper_classes.py) -k 'not ResizeObservation and not explains_errors' $(ARGS)

examples: $(INTEGRATION)/.installed
	$(INTEGRATION)/bin/python scripts/run_examples.py $(ARGS)

bench: $(VENV)/.installed-bench
	$(VENV)/bin/python scripts/bench.py $(or $(ARGS),suite)

chaos: $(VENV)/.installed-dev
	$(VENV)/bin/python scripts/chaos.py $(ARGS)

# A changed pin is newer than these stamps, so the packages are installed again.
$(VENV)/.installed-train: $(PINNED) | $(VENV)/bin/pip
	@echo "Installing envserve, TensorFlow (CPU), MuJoCo, plots, videos and the web page into"
	@echo "$(VENV) (2 GB). This takes 90 s on two cores, plus the time to download 0.5 GB ..."
	$(PIP) --constraint constraints.txt --editable '.[train-cpu,mujoco,page,plot,video]'
	@echo "Installed. To activate the environment: . $(VENV)/bin/activate"
	@touch $@

$(VENV)/.installed-dev: $(PINNED) $(VENV)/.installed-train | $(VENV)/bin/pip
	@echo "Installing the development tools into $(VENV) ..."
	$(PIP) --constraint constraints.txt --editable '.[train-cpu,mujoco,box2d,atari,plot,video,page,metrics,dev]'
	@touch $@

$(VENV)/.installed-bench: $(PINNED) $(VENV)/.installed-train | $(VENV)/bin/pip
	@echo "Installing other vectorised envs and torch into $(VENV); this takes minutes ..."
	$(PIP) --constraint constraints.txt --editable '.[train-cpu,mujoco,bench]'
	@touch $@

$(INTEGRATION)/.installed: $(PINNED) | $(INTEGRATION)/bin/pip
	@echo "Installing other trainers and envs into $(INTEGRATION); this takes minutes ..."
	$(PIP) --constraint constraints.txt --editable '.[train-cpu,mujoco,box2d,atari,envpool,sb3,tianshou,ray,trainers,zoo,plot,video,page,metrics,docs,release,browser,kubernetes,dev]'
	@touch $@

$(FLOOR)/.installed: pyproject.toml constraints-floor.txt | $(FLOOR)/bin/pip
	@echo "Installing the oldest supported versions into $(FLOOR) ..."
	$(PIP) --constraint constraints-floor.txt --editable '.[mujoco]' hypothesis psutil \
	  pygame-ce pytest pytest-asyncio pytest-timeout
	@touch $@

# venv installs pip last, so its presence shows that the environment is complete.
$(VENV)/bin/pip $(INTEGRATION)/bin/pip $(FLOOR)/bin/pip:
	@command -v $(PYTHON) >/dev/null || { echo "make: expected Python 3.11 or" \
	  "newer as $(PYTHON), found no such command; install it, or name another" \
	  "one: make PYTHON=/path/to/python3" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "make: expected Python 3.11 or newer as $(PYTHON), got" \
	  "$$($(PYTHON) --version 2>&1); name a newer one: make PYTHON=python3.12" >&2; \
	  exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' || { echo "make: expected $(PYTHON) to" \
	  "have the modules venv and ensurepip, got the error above; on Debian and" \
	  "Ubuntu: apt-get install python3-venv" >&2; exit 1; }
	$(PYTHON) -m venv --clear $(@D:/bin=)

clean:
	rm -rf $(VENV) $(INTEGRATION) .venv-doors $(FLOOR) build dist *.egg-info .coverage .hypothesis .import_linter_cache \
	  .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
