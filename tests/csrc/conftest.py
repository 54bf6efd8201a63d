"""C++ alone, but for what runs on a package that is built with sanitizers."""


def pytest_itemcollected(item):
    item.add_marker("any_jax_version")
