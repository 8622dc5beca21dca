# Every target does its own set-up; on a fresh machine it takes Python >= 3.11, make and pip, nothing else.
#   make demo                   the main job: the shipped model continues a passage
#   make demo PROMPT='...'      or a text of your own
#   make serve                  the same model behind the APIs that clients speak; SERVE='--port 8080' adds options
#   make test                   set-up, then the gate (scripts/check)
#   make demo TORCH_INDEX=URL   take torch from another index than pip's own (first set-up only)
#   make test PYTHON=python3.12 another interpreter (first set-up only)

PYTHON ?= python3
TORCH_INDEX ?=
PROMPT ?=
SERVE ?=
export PROMPT

VENV := .venv
RORQUAL := $(VENV)/bin/rorqual
INSTALLED := $(VENV)/.installed
WARM := $(VENV)/.warm

.DEFAULT_GOAL := help
.PHONY: help demo test test-all check bench serve setup warm clean

help:
	@sed -n 's/^# \{0,1\}//p;/^$$/q' Makefile
	@echo 'targets: demo test test-all check bench serve setup warm clean'

$(INSTALLED): pyproject.toml constraints.txt scripts/setup.sh
	PYTHON='$(PYTHON)' TORCH_INDEX='$(TORCH_INDEX)' bash scripts/setup.sh
	@touch $@

# Numba keys its cache by the source file, so an edited kernel is compiled again and everything else is only loaded.
$(WARM): $(INSTALLED) $(wildcard rorqual/ops/fast/*.py)
	$(RORQUAL) warm
	@touch $@

setup: $(INSTALLED)

warm: $(WARM)

demo: $(WARM)
	$(RORQUAL) generate --max-tokens 160 --temperature 0.7 --seed 2 --stats -- $${PROMPT:+"$$PROMPT"}

test: $(WARM)
	bash scripts/check

test-all: $(WARM)
	bash scripts/check --all

# The gate alone, for a work tree that is already set up.
check:
	bash scripts/check

bench: $(WARM)
	$(RORQUAL) bench kernels
	$(RORQUAL) bench model --random mid
	$(RORQUAL) bench memory --random real-pair
	$(RORQUAL) bench engine

serve: $(WARM)
	$(RORQUAL) serve $(SERVE)

clean:
	rm -rf $(VENV) build
