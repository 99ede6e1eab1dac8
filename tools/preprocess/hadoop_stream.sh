# Runs one job of Hadoop Streaming; hadoop_streaming.sh and hadoop_append.sh source it.
#
# The programs must be on every machine; GMETA_BIN names their folder if it isn't on the PATH. REDUCERS (32)
# is the number of a job's reducers, STREAMING the path of hadoop-streaming.jar.
bin=${GMETA_BIN:+$GMETA_BIN/}
reducers=${REDUCERS:-32}
jar=${STREAMING:-$(find "${HADOOP_HOME:?}/share/hadoop/tools/lib" -name 'hadoop-streaming-*.jar' | head -n 1)}

# Rows go to reducers by the first field of the key, up to the ".", and are sorted by all of it, as bytes.
stream() { # job's folder, mapper, reducer, reducers, input, output
  hadoop jar "$jar" \
    -D mapreduce.job.name="$2, $3" \
    -D mapreduce.job.reduces="$4" \
    -D stream.num.map.output.key.fields=1 \
    -D mapreduce.map.output.key.field.separator=. \
    -D mapreduce.partition.keypartitioner.options=-k1,1 \
    -D mapreduce.map.output.compress=true \
    -D mapreduce.map.speculative=true -D mapreduce.reduce.speculative=true \
    -cmdenv GMETA_JOB="$1" \
    -partitioner org.apache.hadoop.mapred.lib.KeyFieldBasedPartitioner \
    -mapper "$bin$2" -reducer "$bin$3" \
    -input "$5" -output "$6"
}
