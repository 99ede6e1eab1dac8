#!/usr/bin/env bash
# Runs an append to a store of histories on Hadoop Streaming: one job, and the step that moves the store.
#
#   tools/preprocess/hadoop_append.sh JOB INPUT WORK
#
# JOB    the folder that `gmeta history append --engine streaming --job JOB` made, which all machines see
# INPUT  the input on HDFS: files, a folder or a pattern
# WORK   a folder on HDFS for the job's empty output; it is emptied first
set -euo pipefail

job=${1:?the folder of the job} input=${2:?the input on HDFS} work=${3:?a folder on HDFS}
source "$(dirname "$0")/hadoop_stream.sh"

hadoop fs -rm -r -f -skipTrash "$work"
stream "$job" "gmeta-append map" "gmeta-append reduce" "$reducers" "$input" "$work"
"${bin}gmeta-append" finish --job "$job"
hadoop fs -rm -r -f -skipTrash "$work"
