#!/bin/bash
# Checks everything that needs a GPU on a machine that has one: see docs/gpu.md. Needs no Ray and no
# network; of Python's packages torch, triton, transformers, accelerate, safetensors, numpy, msgspec,
# pydantic, click and nvidia-ml-py. Options are those of `python -m bench.gpu_check --help`.
set -euo pipefail
cd "$(dirname "$0")/.."

if [ -n "${PYTHON:-}" ]; then python=$PYTHON
elif [ -x .venv/bin/python ]; then python=.venv/bin/python
else python=$(command -v python3) || { echo "no python3 found; set PYTHON" >&2; exit 2; }
fi
for package in torch click msgspec pydantic; do
    "$python" -c "import importlib.util as u, sys; sys.exit(u.find_spec('$package') is None)" ||
        { echo "$python has no package $package" >&2; exit 2; }
done

echo "checking with $python" >&2
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1
exec "$python" -m bench.gpu_check "$@"
