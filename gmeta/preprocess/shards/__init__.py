"""Writing of records, shards and their indexes.

`record_encoder` encodes records, `record_writer` writes them to a file, `data_set` writes shards and the
manifest, and `group_reader` reads and summarizes shards without TensorFlow.
"""

__all__: list[str] = []
