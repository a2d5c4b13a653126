"""The site: MyST pages, tutorials that run while it is built, and the API."""

import hashlib
import os
import sys
import urllib.request
from pathlib import Path

DOCS = Path(__file__).parent
ROOT = DOCS.parent
sys.path[:0] = [str(DOCS), str(ROOT)]
# Kernels of the tutorials import the library of this checkout.
os.environ["PYTHONPATH"] = os.pathsep.join(
    filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])
)
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("PYDEVD_DISABLE_FILE_VALIDATION", "1")
# Kernels ignore IPython settings of the user who builds, and do not warn about ports.
profile = DOCS / "_build" / "ipython" / "profile_default"
profile.mkdir(parents=True, exist_ok=True)
(profile / "ipython_kernel_config.py").write_text("c.IPKernelApp.log_level = 40\n")
os.environ["IPYTHONDIR"] = str(profile.parent)

import frame  # noqa: E402

import nnx_parallel  # noqa: E402

nnx_parallel.simulate_devices(8)  # pictures and tables are of real shardings

# The address of the repository, https://github.com/OWNER/NAME. If it is given, every
# page links to the repository, to an editor for the page's source, and to the issues.
repository = os.environ.get("NNX_PARALLEL_REPOSITORY", "")

project = "nnx_parallel"
author = "The nnx_parallel authors"
release = version = nnx_parallel.__version__

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.napoleon",
    "sphinx.ext.intersphinx",
    "sphinx.ext.viewcode",
    "sphinx_copybutton",
    "frame",
    "pages",
    "run_tutorials",
]
exclude_patterns = ["_build", "**/.ipynb_checkpoints"]
html_theme = "sphinx_book_theme"
html_title = "nnx_parallel"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_favicon = "_static/logo.svg"
html_extra_path = ["_build/extra"]  # tutorials and examples to download
html_theme_options = {
    "logo": {
        "text": f"nnx_parallel {release}",
        "image_light": "_static/logo.svg",
        "image_dark": "_static/logo.svg",
    },
    "show_toc_level": 2,
    "home_page_in_toc": True,
    "use_download_button": False,
    "use_fullscreen_button": False,
    "navbar_persistent": [],  # search is in the sidebar
}
if repository:
    html_theme_options |= {
        "repository_url": repository,
        "repository_branch": "main",
        "path_to_docs": "docs",
        "use_repository_button": True,
        "use_issues_button": True,
        "use_edit_page_button": True,
    }
html_show_sourcelink = False
html_copy_source = False

myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3
copybutton_prompt_text = r"\$ "
copybutton_prompt_is_regexp = True

# A name in single backticks becomes a link if the API reference has this name.
default_role = "py:obj"
toc_object_entries_show_parents = "hide"  # long names would break in the contents
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
maximum_signature_line_length = 72  # longer ones have a parameter a line
autodoc_class_signature = "mixed"
autodoc_preserve_defaults = True
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True
napoleon_attr_annotations = False  # the signature has the types


def _sources_hash() -> str:
    """Returns a hash of all code that a tutorial can run, for the cache of outputs."""
    files = sorted((ROOT / "nnx_parallel").rglob("*.py"))
    digest = hashlib.sha256(b"".join(file.read_bytes() for file in files))
    return digest.hexdigest()[:16]


frame.copy_tutorials()
frame.copy_examples()
nb_custom_formats = {".py": "frame.read_tutorial"}
# Scripts of the site are not pages.
exclude_patterns += ["*.py"]
nb_execution_mode = "cache"
nb_execution_cache_path = str(DOCS / "_build" / "executed" / _sources_hash())
nb_execution_in_temp = True
nb_execution_timeout = 3600  # per cell: only a cell that hangs takes longer
nb_execution_raise_on_error = True
nb_merge_streams = True
nb_render_image_options = {"align": "center"}
suppress_warnings = ["mystnb.unknown_mime_type"]


def _reachable(mapping: dict[str, str]) -> dict[str, tuple[str, None]]:
    """Returns the inventories that can be read: without a network, an empty dict."""
    found = {}
    for name, url in mapping.items():
        try:
            with urllib.request.urlopen(f"{url}objects.inv", timeout=3):
                found[name] = (url, None)
        except OSError:
            break
    return found


intersphinx_mapping = _reachable(
    {
        "jax": "https://docs.jax.dev/en/latest/",
        "flax": "https://flax.readthedocs.io/en/latest/",
        "optax": "https://optax.readthedocs.io/en/latest/",
    }
)
