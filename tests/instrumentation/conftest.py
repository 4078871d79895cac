"""The fleets of the contract, with instruments."""

from tests.contract.conftest import made

__all__ = ["made"]
