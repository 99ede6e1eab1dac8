"""Runs ``gmeta history append --engine spark`` under ``spark-submit``, with the arguments that follow.

spark-submit --master yarn tools/preprocess/spark_append.py histories --data hive:shop.clicks
"""

import sys

from gmeta.cli import main

if __name__ == "__main__":
    sys.argv[1:1] = ["history", "append", "--engine", "spark"]
    main(prog_name="gmeta")
