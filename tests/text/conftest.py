"""The language model of several files."""

import pytest


@pytest.fixture(scope="session")
def model():
    from gmctest.causal_lm import causal_model  # needs transformers

    return causal_model()
