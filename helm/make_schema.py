"""Writes values.schema.json of the chart: its own part, and Shoal's schema of a configuration.

Invariant: what `config` of the chart accepts is what `shoal config schema` says, to the letter.
"""

import json
from pathlib import Path
from typing import Any

import yaml

from configs.shoal import ShoalConfig

_HERE = Path(__file__).parent
_CHART_PART = _HERE / "values.schema.yaml"
_TARGET = _HERE / "shoal" / "values.schema.json"


def make_schema() -> str:
    """The file's content."""
    chart: dict[str, Any] = yaml.safe_load(_CHART_PART.read_text())
    config = ShoalConfig.model_json_schema(ref_template="#/$defs/config.{model}")
    sections = config.pop("$defs")
    chart["$defs"] |= {
        "config": config,
        **{f"config.{name}": section for name, section in sections.items()},
    }
    return json.dumps(chart, indent=1) + "\n"


if __name__ == "__main__":
    _TARGET.write_text(make_schema())
