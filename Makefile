# The whole developer interface.
PYTHON ?= python
WITH_TOOLING = -o norecursedirs=build
CXX_FILES = $(shell find csrc -name '*.h' -o -name '*.cpp' -o -name '*.cu' -o -name '*.cuh')

.PHONY: all install format lint type test test-all slow bench gpu-check gpu-rehearsal cuda-compiles sanitizers emulation-sanitizers docs wheel matrix mutants results clean

all: lint type test

install:  ## compile and install in place, keeping the torch that is there
	$(PYTHON) -m pip install --no-build-isolation --no-deps -e .

format:
	ruff check --fix .
	ruff format .
	clang-format -i $(CXX_FILES)

lint:
	ruff check .
	ruff format --check .
	clang-format --dry-run -Werror $(CXX_FILES)

type:
	mypy --strict esper

test:
	$(PYTHON) -m pytest

test-all:  ## those of the tooling and the slow ones, too
	$(PYTHON) -m pytest $(WITH_TOOLING) -m ""

slow:  ## slow tests, and both sides of each benchmark once; starts no slow test after MINUTES
	$(PYTHON) -m pytest --benchmark-disable benchmarks
	$(PYTHON) -m pytest $(WITH_TOOLING) -m slow -rs --minutes $(or $(MINUTES),inf)

bench:
	esper-bench

gpu-check:  ## everything that only a GPU can show
	PYTHON=$(PYTHON) benchmarks/gpu_check.sh

gpu-rehearsal:  ## the CUDA side on fake GPUs, under the CUDA builds of the oldest and the newest torch
	$(PYTHON) tests/rehearsal/rehearse.py

cuda-compiles:  ## compile every CUDA kernel, without a GPU and even beside a CPU torch
	$(PYTHON) build_support/check_cuda_compiles.py

mutants:  ## small deliberate breaks, each of which the test named beside it must notice
	$(PYTHON) tests/mutants/mutate.py

sanitizers:  ## the operators of the CPU and the pool of workers under address and undefined-behaviour sanitizers
	$(PYTHON) build_support/check_sanitizers.py

emulation-sanitizers:  ## the CUDA kernels on the CPU under address and undefined-behaviour sanitizers
	$(PYTHON) -m pytest -m slow tests/tooling/test_sanitizers.py

docs:  ## the pages as a site in build/site; a warning is an error
	NO_MKDOCS_2_WARNING=1 mkdocs build --strict --quiet

wheel:  ## a wheel in dist/, tried in a fresh environment without a compiler
	$(PYTHON) build_support/check_wheel.py

matrix:  ## a wheel for each installed Python, tried with torch 2.11, 2.13 and 2.15
	build_support/matrix.sh

results:  ## run the commands of every recorded page again; resumable, takes hours
	$(PYTHON) benchmarks/record_results.py

clean:
	rm -rf build dist *.egg-info esper/*.so esper/_build_info.json
