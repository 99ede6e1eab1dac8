#!/usr/bin/env bash
# Runs the jobs of a preparation on Hadoop Streaming: sample, sort by task and time, write shards, finish.
#
#   tools/preprocess/hadoop_streaming.sh JOB INPUT WORK
#
# JOB    the folder that `gmeta prepare --engine streaming --job JOB` made, on a file system that all machines see
# INPUT  what to read on HDFS: files, a folder or a pattern
# WORK   a folder on HDFS for what passes between the jobs; it is emptied first
#
# gmeta-map and gmeta-reduce must be on every machine; GMETA_BIN names their folder if it isn't on the PATH.
# REDUCERS (32) is how many reducers a job has, STREAMING the path of hadoop-streaming.jar.
set -euo pipefail

job=${1:?the folder of the job} input=${2:?the input on HDFS} work=${3:?a folder on HDFS}
bin=${GMETA_BIN:+$GMETA_BIN/}
reducers=${REDUCERS:-32}
jar=${STREAMING:-$(find "${HADOOP_HOME:?}/share/hadoop/tools/lib" -name 'hadoop-streaming-*.jar' | head -n 1)}

# Rows go to reducers by the first field of the key, up to the ".", and are sorted by all of it, as bytes.
stream() { # mapper stage, reducer stage, reducers, input, output
  hadoop jar "$jar" \
    -D mapreduce.job.name="gmeta $1 $2" \
    -D mapreduce.job.reduces="$3" \
    -D stream.num.map.output.key.fields=1 \
    -D mapreduce.map.output.key.field.separator=. \
    -D mapreduce.partition.keypartitioner.options=-k1,1 \
    -D mapreduce.map.output.compress=true \
    -D mapreduce.map.speculative=true -D mapreduce.reduce.speculative=true \
    -cmdenv GMETA_JOB="$job" \
    -partitioner org.apache.hadoop.mapred.lib.KeyFieldBasedPartitioner \
    -mapper "${bin}gmeta-map $1" -reducer "${bin}gmeta-reduce $2" \
    -input "$4" -output "$5"
}

hadoop fs -rm -r -f -skipTrash "$work"
stream sample bounds 1 "$input" "$work/bounds"
stream rows tasks "$reducers" "$input" "$work/tasks"
stream batches shards "$reducers" "$work/tasks" "$work/shards"
"${bin}gmeta-reduce" finish --job "$job"
hadoop fs -rm -r -f -skipTrash "$work"
