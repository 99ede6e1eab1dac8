"""Runs ``gmeta prepare --engine spark`` under ``spark-submit``, with the options that follow.

spark-submit --master yarn tools/preprocess/spark_prepare.py --data hive:shop.clicks --task user --out /data
"""

import sys

from gmeta.cli import main

if __name__ == "__main__":
    sys.argv[1:1] = ["prepare", "--engine", "spark"]
    main(prog_name="gmeta")
