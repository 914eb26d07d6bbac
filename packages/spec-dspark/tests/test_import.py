"""What importing the package does not do."""

import subprocess
import sys


def test_importing_the_package_starts_no_backend():
    code = (
        "import spec_dspark, sys\n"
        "xb = sys.modules.get('jax._src.xla_bridge')\n"
        "assert xb is None or not xb.backends_are_initialized()"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
