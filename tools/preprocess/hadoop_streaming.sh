#!/usr/bin/env bash
# Runs the jobs of a preparation on Hadoop Streaming: sample, sort by task and time, write shards, finish.
#
#   tools/preprocess/hadoop_streaming.sh JOB INPUT WORK
#
# JOB    the folder that `gmeta prepare --engine streaming --job JOB` made, on a file system that all machines see
# INPUT  the input on HDFS: files, a folder or a pattern
# WORK   a folder on HDFS for data between the jobs; it is emptied first
set -euo pipefail

job=${1:?the folder of the job} input=${2:?the input on HDFS} work=${3:?a folder on HDFS}
source "$(dirname "$0")/hadoop_stream.sh"

hadoop fs -rm -r -f -skipTrash "$work"
stream "$job" "gmeta-map sample" "gmeta-reduce bounds" 1 "$input" "$work/bounds"
stream "$job" "gmeta-map rows" "gmeta-reduce tasks" "$reducers" "$input" "$work/tasks"
stream "$job" "gmeta-map batches" "gmeta-reduce shards" "$reducers" "$work/tasks" "$work/shards"
"${bin}gmeta-reduce" finish --job "$job"
hadoop fs -rm -r -f -skipTrash "$work"
