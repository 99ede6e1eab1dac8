"""Writing of records, shards and their indexes.

`record_encoder` encodes records, `record_writer` writes them to a file, and `data_set` writes shards and the
manifest, and reads shards without TensorFlow.
"""

__all__: list[str] = []
