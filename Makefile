# The project's commands; `make` alone names them. None of them asks anything, so they run unattended.

PYTHON ?=
DATA ?=
# A run of its own for each data set, so that changing DATA neither mixes them nor is refused.
RUN ?= runs/$(if $(DATA),$(notdir $(patsubst %/,%,$(DATA))),demo)
PYTEST_ARGS ?=
TENSORFLOW ?=
MINUTES ?= 10
SEED ?= 0
KILLS ?= 20
SUBJECT ?=
ARGS ?=

JOBS = $(shell nproc)
# Each worker of pytest holds a TensorFlow of its own: one a core, at most 4. PYTEST_ARGS="-n 0" runs without.
TEST_WORKERS = $(shell nproc | awk '{ print ($$1 < 4 ? $$1 : 4) }')
# A file's tests share what they train, so a worker takes whole files; tests/conftest.py says in which order.
IN_PARALLEL = -n $(TEST_WORKERS) --dist loadfile --no-loadscope-reorder
VENV := .venv
BIN := $(VENV)/bin
CXX_FILES = $(shell find ops io tests/native -name '*.h' -o -name '*.cc' -o -name '*.cu' -o -name '*.cuh')

# CMake's own makes needn't say which folder they are in.
MAKEFLAGS += --no-print-directory

.DEFAULT_GOAL := help
.PHONY: help setup bench demo demo-online test test-longer test-all test-ranks test-tensorflow wheel test-gpu test-gpu-ranks lint format native test-native test-asan test-tsan fuzz soak online-kills pins clean

help:  ## Name the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## */\t/' | \
	  while IFS="$$(printf '\t')" read -r name text; do printf '  make %-12s %s\n' "$$name" "$$text"; done

setup:  ## Make .venv with the pins, Horovod and the native libraries; seconds when it is there [PYTHON=python3.11]
	@PYTHON='$(PYTHON)' sh tools/dev/setup.sh

# Without DATA: a generated log of clicks, all the way to predictions for a new user in stock TensorFlow.
demo: setup  ## Prepare, train, evaluate, export, predict [DATA=a MovieLens folder: to the report] [RUN=a folder]
ifeq ($(DATA),)
	$(BIN)/python tools/dev/demo_clicks.py '$(RUN)/clicks'
	$(BIN)/gmeta prepare --data '$(RUN)/clicks/*.parquet' --task user_id --time ts --label click --out '$(RUN)/data'
else
	$(BIN)/gmeta prepare --out '$(RUN)/data' --data '$(DATA)'
endif
	$(BIN)/gmeta train --run '$(RUN)' $(if $(DATA),,--for cold-start --budget 55s)
	$(BIN)/gmeta evaluate --run '$(RUN)' --json '$(RUN)/evaluation.json'
ifeq ($(DATA),)
	$(BIN)/gmeta export --run '$(RUN)' --out '$(RUN)/serving'
	$(BIN)/python tools/dev/demo_client.py '$(RUN)/serving' '$(RUN)/clicks/new_user.json'
endif

demo-online: setup  ## Train on a generated stream and serve it, in three minutes: what fresh rows are worth [RUN=a folder]
	$(BIN)/python tools/dev/demo_online.py '$(if $(filter file,$(origin RUN)),runs/online,$(RUN))'

test: setup lint  ## Everything that must hold before a commit: setup, lint, all tests [PYTEST_ARGS=...]
	$(BIN)/pytest $(IN_PARALLEL) $(PYTEST_ARGS)

test-longer: setup  ## What `test` leaves out for time: tests that a quicker one stands for
	$(BIN)/pytest $(IN_PARALLEL) -m 'longer and not slow' $(PYTEST_ARGS)

test-all: setup lint  ## `test` and `test-longer`, and the rest: benchmarks, soaks, more of what another test shows, all ranks
	GMETA_ALL_CASES=1 $(BIN)/pytest $(IN_PARALLEL) -m '' $(PYTEST_ARGS)

test-ranks: setup  ## Every model and optimizer on 2, 3 and 4 ranks, and what else `test` leaves out
	GMETA_ALL_CASES=1 $(BIN)/pytest $(IN_PARALLEL) -m 'slow or longer or ranks'

# An environment of its own, beside .venv; Horovod's tests are skipped there.
test-tensorflow:  ## All tests on another TensorFlow, under build/tensorflow/ [TENSORFLOW=2.21.0, or lowest] [PYTHON=...] [PYTEST_ARGS=...]
	@[ -n '$(TENSORFLOW)' ] || { echo 'name a version: make test-tensorflow TENSORFLOW=2.21.0' >&2; exit 1; }
	@PYTHON='$(PYTHON)' TENSORFLOW='$(TENSORFLOW)' sh tools/dev/setup.sh
	build/tensorflow/$(TENSORFLOW)/venv/bin/pytest $(IN_PARALLEL) $(PYTEST_ARGS)

# For other machines, and without compiling there: see tools/dev/build_wheel.py.
wheel:  ## A wheel for a TensorFlow, tried in an empty environment: dist/*.whl [TENSORFLOW=2.21.0] [PYTHON=...]
	@[ -n '$(TENSORFLOW)' ] || { echo 'name a version: make wheel TENSORFLOW=2.21.0' >&2; exit 1; }
	@PYTHON='$(PYTHON)' TENSORFLOW='$(TENSORFLOW)' sh tools/dev/setup.sh --packages
	build/tensorflow/$(TENSORFLOW)/venv/bin/python tools/dev/build_wheel.py

# On one GPU, one process: two would share its memory.
test-gpu: setup  ## What needs a GPU: kernels by their C interface, ops, tables and layers on it
	$(BIN)/pytest -n 0 tests/cuda tests/ops -k 'gpu or cuda or table_device'
	GMETA_TABLE_DEVICE=gpu $(BIN)/pytest -n 0 tests/layers/embedding/test_collection.py \
	  tests/layers/exchange/test_recorded_lookups.py tests/layers/exchange/test_pieces.py

test-gpu-ranks: setup  ## What needs 2 GPUs or more: ranks with a GPU each, their collectives and pipelines
	$(BIN)/pytest -n 0 -m '' tests/distributed/test_gpu_*.py tests/distributed/test_pipeline_faults.py

SUBJECTS = $(sort $(filter-out harness,$(basename $(notdir $(wildcard tools/bench/*.py)))))

# The subject is checked before anything is set up.
bench:  ## Measure a part of gmeta beside its peers, in one run [SUBJECT=table] [ARGS="--json FILE"]
	$(if $(filter $(SUBJECTS),$(SUBJECT)),,$(error no benchmark '$(SUBJECT)'; there are $(SUBJECTS)))
	@$(MAKE) setup
	$(BIN)/python tools/bench/$(SUBJECT).py $(ARGS)

lint: setup  ## Style, formatting and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/clang-format --dry-run -Werror $(CXX_FILES)
	$(BIN)/mypy

format: setup  ## Rewrite Python and C++ in the house's style
	$(BIN)/ruff check --fix-only .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(CXX_FILES)

native: setup  ## Compile what changed in ops/ and io/
	$(BIN)/python -W ignore setup.py -q build_ext --inplace

# One build folder a sanitizer. The cores know no TensorFlow, so all of what runs is instrumented.
test-native test-asan test-tsan: test-%: setup
	$(BIN)/cmake -S . -B build/$@ -DGMETA_BUILD_OPS=OFF -DGMETA_BUILD_TESTS=ON -DGMETA_CUDA=OFF \
	  -DGMETA_SANITIZE=$(SANITIZER_$*)
	$(BIN)/cmake --build build/$@ --parallel $(JOBS)
	cd build/$@ && ctest --output-on-failure
SANITIZER_asan := address,undefined
SANITIZER_tsan := thread

test-native:  ## The native cores' tests
test-asan:  ## ... under the address and undefined behaviour sanitizers
test-tsan:  ## ... under the thread sanitizer

fuzz: setup  ## Make up damaged files for all that parses files, under sanitizers [MINUTES=10] [SEED=0]
	$(BIN)/cmake -S . -B build/fuzz -DGMETA_BUILD_OPS=OFF -DGMETA_BUILD_FUZZ=ON -DGMETA_CUDA=OFF
	$(BIN)/cmake --build build/fuzz --target fuzz --parallel $(JOBS)
	nice $(BIN)/python tools/dev/fuzz_manifests.py --minutes $(MINUTES) --seed $(SEED) --out build/fuzz & \
	  manifests=$$!; nice build/fuzz/fuzz --minutes $(MINUTES) --seed $(SEED) --out build/fuzz; found=$$?; \
	  wait $$manifests && exit $$found

soak: setup  ## Random table operations, saves and kills, against the reference [MINUTES=10] [SEED=0]
	$(BIN)/python tools/dev/soak.py --minutes $(MINUTES) --seed $(SEED)

online-kills: setup  ## Kill all processes of a training on a stream; it must end as if none had been [KILLS=20] [SEED=0]
	$(BIN)/python tools/dev/online_kills.py --kills $(KILLS) --seed $(SEED)

pins: setup  ## Resolve constraints.txt anew, for every supported Python that is found
	$(BIN)/python tools/dev/pin.py

clean:  ## Remove what was built and prepared; keeps runs/
	rm -rf build dist .venv *.egg-info .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find gmeta -name '*.so' -delete
