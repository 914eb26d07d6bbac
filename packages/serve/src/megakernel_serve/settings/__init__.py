"""Settings from flags, environment, ``.env`` and ``megakernel.toml``."""

from megakernel_serve.settings.layers import CONFIG_NAME, Layers, SettingsError, flag, variable
from megakernel_serve.settings.table import Option, Settings, options

__all__ = [
    "CONFIG_NAME",
    "Layers",
    "Option",
    "Settings",
    "SettingsError",
    "flag",
    "options",
    "variable",
]
