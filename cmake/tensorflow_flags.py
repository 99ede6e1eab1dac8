"""Prints the flags of the installed TensorFlow for CMake, as a CMake list: version;include;lib;abi.

An argument is the folder of packages that has it, for a Python that doesn't look there: the one in which pip
builds.
"""

import sys

sys.path += sys.argv[1:]

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
