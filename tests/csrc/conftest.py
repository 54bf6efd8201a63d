"""C++ alone."""


def pytest_itemcollected(item):
    item.add_marker("any_jax_version")
