"""CUDA graphs against eager steps."""

from importlib import import_module

from bench.gpu_check.parts import NotRun, Result, Setting


def check_graphs(setting: Setting) -> Result:
    """Raises `NotRun` where there are none."""
    try:
        import_module("engine.models.graphs")
    except ModuleNotFoundError:
        raise NotRun("not built: there is no engine/models/graphs.py") from None
    if setting.device.type != "cuda":
        raise NotRun(f"graphs are captured on a GPU, not on {setting.device.type}")
    raise NotRun("engine/models/graphs.py is there, and this check does not know it yet")
