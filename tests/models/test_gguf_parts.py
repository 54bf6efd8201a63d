"""GGUF files that llama.cpp has split: read as one, saved as one, and refused where a part is missing or wrong."""

import gguf
import numpy as np
import pytest

from models import gguf_format, llama, llama_files
from models._errors import ModelFileError
from models.generate.__main__ import main
from models.gguf import open_model

from . import test_gguf


def split(folder, split_max_tensors=8, small_first_shard=False):
    """The same small model in one file and in three; the first part's path."""
    test_gguf.write(folder / "whole.gguf")
    options = {"split_max_tensors": split_max_tensors, "small_first_shard": small_first_shard}
    test_gguf.write(folder / "model.gguf", **options)
    parts = sorted(folder.glob("model-*"))
    assert [part.name for part in parts] == [f"model-0000{i}-of-00003.gguf" for i in (1, 2, 3)]
    return parts


@pytest.fixture
def parts(tmp_path):
    return split(tmp_path)


def assert_same(one, other):
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert (tensor.shape, tensor.encoding) == (other[name].shape, other[name].encoding)
        np.testing.assert_array_equal(tensor.data, other[name].data)


def refused(path, match):
    for read in (open_model, gguf_format.open_tensors):
        with pytest.raises(ModelFileError, match=match) as caught:
            read(path)
        assert str(caught.value).startswith(f"{path}: ")
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("most", "empty_first"), [(8, False), (10, True)])
def test_parts_are_read_as_one_file(most, empty_first, tmp_path):
    """Also where the first has no tensors. Nothing is copied."""
    parts, whole = split(tmp_path, most, empty_first), open_model(tmp_path / "whole.gguf")
    file = open_model(parts[0])
    assert file.config == whole.config
    assert len(file.mapped) == 3
    assert_same(file.tensors, whole.tensors)
    assert_same(gguf_format.open_tensors(parts[0]), whole.tensors)
    assert not any(tensor.data.flags.owndata for tensor in file.tensors.values())
    file.forget_pages()
    assert_same(file.tensors, whole.tensors)


def test_a_model_in_parts_is_saved_in_one_file(parts, tmp_path):
    file = open_model(parts[0])
    llama_files.save(tmp_path / "again.gguf", llama.load(file), file)
    whole, again = open_model(tmp_path / "whole.gguf"), open_model(tmp_path / "again.gguf")
    assert_same(again.tensors, whole.tensors)
    assert again.metadata.keys() == whole.metadata.keys()


def test_a_file_that_was_joined_is_whole(tmp_path):
    """`llama-gguf-split --merge` leaves a count of no parts."""
    writer = gguf.GGUFWriter(tmp_path / "joined", "anything")
    writer.add_uint16("split.count", 0)
    writer.add_int32("split.tensors.count", 30)
    writer.add_tensor("x", np.ones(4, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert gguf_format.open_tensors(tmp_path / "joined").keys() == {"x"}


def test_parts_that_are_not_there(parts, capsys):
    for part in parts[1:]:
        refused(part, f"expected the first of 3 parts of a file; got part {part.name[10]}. Pass the first one")
    away = parts[2].rename(parts[2].with_name("away"))
    message = (
        "expected part 3 of 3 beside it, model-00003-of-00003.gguf; got none. Keep all .*`llama-gguf-split --merge`"
    )
    refused(parts[0], message)
    assert main(["hi", "--weights", str(parts[0])]) == 2
    assert "got none. Keep all parts in one folder" in capsys.readouterr().err
    away.rename(parts[2])
    renamed = parts[0].rename(parts[0].with_name("first.gguf"))
    refused(renamed, "expected a name that ends with '-00001-of-00003.gguf', as it is part 1 of 3. Keep all parts")


def test_parts_that_are_wrong(parts, tmp_path):
    data = [part.read_bytes() for part in parts]
    parts[1].write_bytes(data[2])
    refused(
        parts[0], "model-00002-of-00003.gguf: expected part 2 of 3; got part 3 of 3. The file is truncated or corrupt"
    )
    parts[1].write_bytes((tmp_path / "whole.gguf").read_bytes())
    refused(parts[0], "model-00002-of-00003.gguf: expected part 2 of 3; got part 1 of 1")
    parts[1].write_bytes(data[1][:-100])
    refused(parts[0], "model-00002-of-00003.gguf: expected .* bytes at offset .*; got the end of the file")
    parts[1].write_bytes(data[0].replace(b"split.no\x02\0\0\0\0\0", b"split.no\x02\0\0\0\1\0"))
    refused(parts[0], "model-00002-of-00003.gguf: expected tensor 'blk.0.attn_k.weight' in one part; got it again")
    parts[1].write_bytes(data[1])
    count = len(open_model(parts[0]).tensors)
    old, new = (b"split.tensors.count\x05\0\0\0" + number.to_bytes(4, "little") for number in (count, count + 1))
    assert old in data[0]
    parts[0].write_bytes(data[0].replace(old, new))
    refused(parts[0], f"expected {count + 1} tensors in 3 parts; got {count}. The file is truncated")
