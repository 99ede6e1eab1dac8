"""Prints what CMake needs of the installed TensorFlow, as a CMake list: version;include;lib;abi."""

import tensorflow as tf

print(
    ";".join(
        (
            tf.__version__,
            tf.sysconfig.get_include(),
            tf.sysconfig.get_lib(),
            str(tf.sysconfig.CXX11_ABI_FLAG),
        )
    )
)
