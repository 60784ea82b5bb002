"""The fixture of the packages of others."""

from tests.kit.package_environment import kept_environments

__all__ = ["kept_environments"]
