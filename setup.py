"""Where the folders of this checkout go in the installed package; everything else is in pyproject.toml.

    gdn_multi/  ->  gdn_multi
    backends/   ->  gdn_multi.backends      (every folder in it with an __init__.py)
    csrc/       ->  gdn_multi/csrc          (data: the CUDA sources, all files)
    docs/*.md   ->  gdn_multi/docs          (data: read by ``python -m gdn_multi demo``)
"""

from setuptools import find_packages, setup

setup(
    packages=[
        *find_packages(include=["gdn_multi", "gdn_multi.*"]),
        "gdn_multi.backends",
        *("gdn_multi.backends." + name for name in find_packages("backends")),
        "gdn_multi.csrc",
        "gdn_multi.docs",
    ],
    package_dir={
        "gdn_multi.backends": "backends",
        "gdn_multi.csrc": "csrc",
        "gdn_multi.docs": "docs",
    },
    package_data={"gdn_multi.csrc": ["**/*"], "gdn_multi.docs": ["*.md"]},
    include_package_data=False,
)
