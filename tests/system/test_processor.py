"""The name of a processor tells generations apart."""

import pytest

from labkit.system import processor


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"model name": "AMD EPYC", "cpu family": "26", "model": "2"}, "AMD EPYC family 26 model 2"),
        ({"model name": "AMD EPYC 9355", "cpu family": "26", "model": "2"}, "AMD EPYC 9355"),
        ({"model name": "Neoverse"}, "Neoverse"),
    ],
)
def test_a_name_without_a_number_gets_family_and_model(
    fields: dict[str, str], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processor, "cpu_field", lambda field: fields.get(field, ""))
    assert processor.cpu_name() == name
