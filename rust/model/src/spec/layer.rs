//! Layers as lists of residual blocks.

use std::collections::BTreeSet;
use std::ops::Range;

use serde::{Deserialize, Serialize};

use super::norm::{NormSpec, check_norm};
use super::table::TableSpec;
use crate::limits::{SpecError, finite, require, size};
use crate::memory::MemoryNeed;
use crate::mixers::{AttentionSpec, IndexerSpec, MixerSpec, TableColumns};
use crate::rope::RopeSpec;
use crate::streams::{SpanSpec, StreamMixSpec, StreamsSpec};

/// A layer: residual blocks, which run in order.
#[derive(Debug, Clone, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct LayerSpec {
    /// Blocks, first to last.
    pub blocks: Vec<BlockSpec>,
    /// In a model with several residual streams: the spans that the blocks belong to, first to last.
    #[serde(default)]
    pub spans: Vec<SpanSpec>,
    /// Whether the residual stream is multiplied by a stored number after the last block.
    pub scalar: bool,
}

/// Residual block: `x = sum_norm(stream_scale * x + residual_scale * post_norm(mixer(input_scale * norm(x))))`. Parallel
/// blocks that have a joint norm compute `x = sum_norm(stream_scale * x + joint_norm(sum of residual_scale * ...))`.
#[derive(Debug, Clone, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct BlockSpec {
    /// Name in the roles of its tensors: block `ffn` of layer 3 has `layers.3.ffn.down.weight` and, for its norms,
    /// `layers.3.ffn_norm.weight`, `layers.3.ffn_post_norm.weight` and `layers.3.ffn_sum_norm.weight`.
    pub name: String,
    /// Function from the normed input to the output.
    pub mixer: MixerSpec,
    /// Input of the block.
    #[serde(default)]
    pub input: BlockInput,
    /// Earlier layer whose block of the same name has the weights of this one.
    #[serde(default)]
    pub weights_of: Option<usize>,
    /// Additions to the linear layers of the mixer.
    #[serde(default)]
    pub low_rank: Vec<LowRankSpec>,
    /// Norm of the mixer's input.
    pub norm: Option<NormSpec>,
    /// Norm of the mixer's output.
    pub post_norm: Option<NormSpec>,
    /// Norm after the output is added to the residual stream.
    pub sum_norm: Option<NormSpec>,
    /// Norm of the sum of the outputs of this block and of the blocks that are parallel to it.
    pub joint_norm: Option<NormSpec>,
    /// Whether the block reads the same residual stream as the block before it. Without a norm of its own it then
    /// reads that block's normed input.
    pub parallel: bool,
    /// Factor on the mixer's input.
    #[serde(default = "super::one")]
    pub input_scale: f32,
    /// Factor on the mixer's output.
    pub residual_scale: f32,
    /// Factor on what the output is added to.
    #[serde(default = "super::one")]
    pub stream_scale: f32,
    /// Whether the output is added to the normed input instead of the input.
    pub residual_after_norm: bool,
}

/// Upper limit for the number of blocks of a layer, above that of any known model.
const MAX_BLOCKS: usize = 16;

/// Input of a block.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Deserialize, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum BlockInput {
    /// The residual stream.
    #[default]
    Stream,
    /// The residual stream joined with what the first layer reads: rows of twice the hidden size.
    StreamAndEmbedding,
    /// The output of the block before, which is then not added to the stream.
    Output,
    /// The sum of the residual stream and the output of the block before, which is then not added to the stream.
    StreamPlusOutput,
}

impl BlockInput {
    /// Returns the number of columns.
    pub(crate) fn columns(self, hidden_size: usize) -> usize {
        if self == Self::StreamAndEmbedding { 2 * hidden_size } else { hidden_size }
    }

    /// Returns whether the block takes the output of the block before.
    pub(crate) fn takes_output(self) -> bool {
        matches!(self, Self::Output | Self::StreamPlusOutput)
    }
}

/// Low-rank addition `(x A^T) B^T` to some outputs of a linear layer, which belongs to the block even if its weights are
/// those of another one. Roles: `low_rank.<index>.a.weight` and `low_rank.<index>.b.weight`.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct LowRankSpec {
    /// Roles of the outputs, which are neighbours in one linear layer.
    pub outputs: Vec<String>,
    /// Rows of A.
    pub rank: usize,
}

impl LayerSpec {
    pub(super) fn check(&self, path: &str, ropes: &[RopeSpec], hidden_size: usize) -> Result<(), SpecError> {
        let count = self.blocks.len();
        require(&format!("{path}.blocks (their number)"), count, (1..=MAX_BLOCKS).contains(&count), || {
            format!("in 1..={MAX_BLOCKS}")
        })?;
        let mut names = BTreeSet::new();
        for (i, block) in self.blocks.iter().enumerate() {
            let path = format!("{path}.blocks[{i}]");
            require(&format!("{path}.name"), &block.name, is_name(&block.name) && names.insert(&block.name), || {
                "lowercase letters, digits and underscores that no other block of the layer has".to_owned()
            })?;
            require(&format!("{path}.parallel"), block.parallel, i > 0 || !block.parallel, || {
                "false for the first block of a layer".to_owned()
            })?;
            require(
                &format!("{path}.residual_after_norm"),
                block.residual_after_norm,
                !(block.parallel && block.residual_after_norm),
                || "false for a block that is parallel to the one before it".to_owned(),
            )?;
            require(
                &format!("{path}.joint_norm"),
                block.joint_norm.is_some(),
                !(block.parallel && block.joint_norm.is_some()),
                || "null for a block that is parallel to the one before it".to_owned(),
            )?;
            require(
                &format!("{path}.stream_scale"),
                block.stream_scale,
                !block.parallel || block.stream_scale == 1.0,
                || "1 for a block that is parallel to the one before it".to_owned(),
            )?;
            let first = self.blocks[..=i].iter().rfind(|block| !block.parallel);
            let joint = block.parallel && first.is_some_and(|first| first.joint_norm.is_some());
            require(
                &format!("{path}.sum_norm"),
                block.sum_norm.is_some(),
                !(joint && block.sum_norm.is_some()),
                || "null where the first of the parallel blocks has a joint norm".to_owned(),
            )?;
            self.check_input(&path, i)?;
            block.check(&path, ropes, hidden_size)?;
        }
        Ok(())
    }

    /// Checks that the spans are there if the model has several streams, and only then, and that they have all blocks.
    pub(super) fn check_spans(&self, path: &str, streams: Option<&StreamsSpec>) -> Result<(), SpecError> {
        let Some(StreamsSpec { count, .. }) = streams else {
            self.check_streams(path, 0..self.blocks.len(), 1)?;
            return require(&format!("{path}.spans (their number)"), self.spans.len(), self.spans.is_empty(), || {
                "0 for a model with one residual stream".to_owned()
            });
        };
        let (layer_path, mut end) = (path, 0usize);
        for (i, span) in self.spans.iter().enumerate() {
            let path = format!("{path}.spans[{i}]");
            let is_unique = self.blocks.iter().all(|block| block.name != span.name)
                && self.spans[..i].iter().all(|before| before.name != span.name);
            require(&format!("{path}.name"), &span.name, is_unique && is_name(&span.name), || {
                "lowercase letters, digits and underscores that no other block or span of the layer has".to_owned()
            })?;
            let first = end;
            end = end.saturating_add(span.blocks);
            let reads_stream = |next: &BlockSpec| !next.parallel && !next.input.takes_output();
            let ends_group = self.blocks.get(end).is_none_or(reads_stream);
            let fits = span.blocks > 0 && end <= self.blocks.len() && ends_group;
            require(&format!("{path}.blocks"), span.blocks, fits, || {
                "a number of blocks that the layer has, and that the next one reads nothing of".to_owned()
            })?;
            span.mix.check(&format!("{path}.mix"), *count)?;
            let is_joined = span.mix == StreamMixSpec::Joined;
            self.check_streams(layer_path, first..end, if is_joined { *count } else { 1 })?;
        }
        require(&format!("{path}.spans (their blocks)"), end, end == self.blocks.len(), || {
            format!("all {} of the layer, which has several residual streams", self.blocks.len())
        })
    }

    /// Checks that the mixers of some blocks read `count` residual streams side by side. Blocks of several streams have no
    /// norms, which would span only one.
    fn check_streams(&self, path: &str, blocks: Range<usize>, count: usize) -> Result<(), SpecError> {
        for i in blocks {
            let (block, path) = (&self.blocks[i], format!("{path}.blocks[{i}]"));
            let streams = block.mixer.streams();
            require(&format!("{path}.mixer.streams"), streams, streams == count, || {
                format!("{count}, the number of residual streams that the block reads")
            })?;
            let norms = [
                ("norm", block.norm),
                ("post_norm", block.post_norm),
                ("sum_norm", block.sum_norm),
                ("joint_norm", block.joint_norm),
            ];
            for (name, norm) in norms {
                require(&format!("{path}.{name}"), format!("{norm:?}"), count == 1 || norm.is_none(), || {
                    "null for a block of several residual streams".to_owned()
                })?;
            }
            let reads_stream = block.input == BlockInput::Stream;
            require(&format!("{path}.input"), format!("{:?}", block.input), count == 1 || reads_stream, || {
                "stream for a block of several residual streams".to_owned()
            })?;
        }
        Ok(())
    }

    /// Checks that keys and values of another layer, which a block reads, are there: `before` has the layers before this
    /// one.
    pub(super) fn check_shared(&self, path: &str, before: &[Self]) -> Result<(), SpecError> {
        for (i, block) in self.blocks.iter().enumerate() {
            let [MemoryNeed::PagesOf { layer, shape, window }] = block.mixer.memory()[..] else { continue };
            let read = before.get(layer).map_or(Vec::new(), Self::memory);
            let pages = |need: &&MemoryNeed| !matches!(need, MemoryNeed::State { .. });
            let alone = read.iter().filter(pages).eq([&MemoryNeed::Pages { shape, window }]);
            require(&format!("{path}.blocks[{i}].mixer.kv_layer"), layer, alone, || {
                "an earlier layer with one attention, which has its own keys and values of the same sizes and window"
                    .to_owned()
            })?;
        }
        Ok(())
    }

    /// Checks the choices of tokens in a model that is `causal` or not: rows attend to tokens up to their own, and a choice
    /// that is reused is the last one in the layers `before` this one.
    pub(super) fn check_choices(&self, path: &str, before: &[Self], causal: bool) -> Result<(), SpecError> {
        for (i, block) in self.blocks.iter().enumerate() {
            let MixerSpec::Attention(attention) = &block.mixer else { continue };
            let path = format!("{path}.blocks[{i}].mixer");
            let chooses = attention.indexer.is_some();
            require(&format!("{path}.indexer"), chooses, causal || !chooses, || {
                "null for bidirectional attention".to_owned()
            })?;
            let Some(layer) = attention.selection_layer else { continue };
            let last =
                before.iter().enumerate().rev().find_map(|(index, layer)| Some((index, layer.indexer()?.sets())));
            let is_last = last.is_some_and(|(last, sets)| last == layer && attention.kv_heads().is_multiple_of(sets));
            require(&format!("{path}.selection_layer"), layer, is_last, || {
                "the last earlier layer with an indexer, whose choices the heads of keys and values can share"
                    .to_owned()
            })?;
        }
        Ok(())
    }

    /// Returns the indexer of the last attention of the layer that has one.
    fn indexer(&self) -> Option<&IndexerSpec> {
        self.attentions().filter_map(|attention| attention.indexer.as_ref()).last()
    }

    /// Returns the attentions of the layer.
    pub(crate) fn attentions(&self) -> impl Iterator<Item = &AttentionSpec> {
        self.blocks.iter().filter_map(|block| match &block.mixer {
            MixerSpec::Attention(attention) => Some(attention),
            _ => None,
        })
    }

    /// Checks that the columns of tables that blocks read are there.
    pub(super) fn check_columns(&self, path: &str, tables: &[TableSpec]) -> Result<(), SpecError> {
        for (i, block) in self.blocks.iter().enumerate() {
            let Some(TableColumns { tables: read, first, count, hashed_rows }) = block.mixer.columns() else {
                continue;
            };
            let path = format!("{path}.blocks[{i}].mixer");
            let found = tables.get(read.clone()).unwrap_or_default();
            let is_hashed = hashed_rows.is_some();
            let are_alike = found.split_last().is_some_and(|(last, before)| {
                let rows = before.first().unwrap_or(last).rows;
                before.iter().all(|table| table.rows == rows)
                    && last.rows <= rows
                    && found.iter().all(|table| table.hashed == is_hashed)
            });
            let field = if is_hashed { "first_table" } else { "table" };
            require(&format!("{path}.{field}"), read.start, are_alike, || {
                let kind = if is_hashed {
                    "hashed, all but the last with the same number of rows, and the last with no more"
                } else {
                    "not hashed"
                };
                format!("such that tables {read:?} are among the {} of the model, and are {kind}", tables.len())
            })?;
            let rows = found.iter().fold(0, |rows: usize, table| rows.saturating_add(table.rows));
            let wanted = hashed_rows.unwrap_or(0);
            require(&format!("{path}.hash_rows (their sum)"), wanted, wanted <= rows, || {
                format!("at most the {rows} rows of the tables")
            })?;
            let columns = found.iter().map(|table| table.columns).min().unwrap_or(0);
            let (field, value) = if is_hashed { ("columns", count) } else { ("first_column", first) };
            require(&format!("{path}.{field}"), value, first.saturating_add(count) <= columns, || {
                format!("such that {count} columns from column {first} on are among the {columns} of each table")
            })?;
        }
        Ok(())
    }

    /// Returns the sequence memory of the blocks that need any.
    fn memory(&self) -> Vec<MemoryNeed> {
        self.blocks.iter().flat_map(|block| block.mixer.memory()).collect()
    }

    /// Returns the index of the first layer whose keys and values, or choice of tokens, a block reads.
    pub(crate) fn reads_layer(&self) -> Option<usize> {
        self.attentions().find_map(|attention| attention.kv_layer.or(attention.selection_layer))
    }

    /// Checks that block `index` can read its input.
    fn check_input(&self, path: &str, index: usize) -> Result<(), SpecError> {
        let block = &self.blocks[index];
        let field = format!("{path}.input");
        let check =
            |holds: bool, limit: &str| require(&field, format!("{:?}", block.input), holds, || limit.to_owned());
        if block.input == BlockInput::Stream {
            return Ok(());
        }
        let is_alone = !block.parallel && self.blocks.get(index + 1).is_none_or(|next| !next.parallel);
        check(is_alone && !block.residual_after_norm, "stream for parallel blocks, and with residual_after_norm")?;
        if block.input == BlockInput::StreamAndEmbedding {
            check(block.mixer.reads_any_width(), "stream for this mixer, whose input is as wide as the stream")?;
        }
        let gives = |before: &BlockSpec| {
            !before.parallel
                && !before.residual_after_norm
                && before.sum_norm.is_none()
                && before.joint_norm.is_none()
                && (before.stream_scale, before.residual_scale) == (1.0, 1.0)
        };
        let is_given = !block.input.takes_output() || index > 0 && gives(&self.blocks[index - 1]);
        check(is_given, "stream unless the block before has no factors, is not parallel, and norms no sum")
    }

    /// Checks that the blocks whose weights are those of an earlier layer's find them: `before` has the layers before
    /// this one.
    pub(super) fn check_weights_of(&self, path: &str, before: &[Self]) -> Result<(), SpecError> {
        for (i, block) in self.blocks.iter().enumerate() {
            let Some(layer) = block.weights_of else { continue };
            let owner = before.get(layer).and_then(|layer| layer.blocks.iter().find(|other| other.name == block.name));
            let fits = owner.is_some_and(|owner| {
                let norms = |block: &BlockSpec| [block.norm, block.post_norm, block.sum_norm, block.joint_norm];
                let is_own = owner.weights_of.is_none();
                is_own && owner.mixer == block.mixer && owner.input == block.input && norms(owner) == norms(block)
            });
            require(&format!("{path}.blocks[{i}].weights_of"), layer, fits, || {
                format!(
                    "an earlier layer whose block {:?} has its own weights, and the same mixer and norms",
                    block.name
                )
            })?;
        }
        Ok(())
    }
}

/// Returns whether a text can be the name of a block or span.
fn is_name(text: &str) -> bool {
    !text.is_empty() && text.bytes().all(|c| c.is_ascii_lowercase() || c.is_ascii_digit() || c == b'_')
}

impl BlockSpec {
    fn check(&self, path: &str, ropes: &[RopeSpec], hidden_size: usize) -> Result<(), SpecError> {
        check_norm(&format!("{path}.norm"), self.norm)?;
        check_norm(&format!("{path}.post_norm"), self.post_norm)?;
        check_norm(&format!("{path}.sum_norm"), self.sum_norm)?;
        check_norm(&format!("{path}.joint_norm"), self.joint_norm)?;
        finite(&format!("{path}.input_scale"), self.input_scale)?;
        finite(&format!("{path}.residual_scale"), self.residual_scale)?;
        finite(&format!("{path}.stream_scale"), self.stream_scale)?;
        for (i, low_rank) in self.low_rank.iter().enumerate() {
            size(&format!("{path}.low_rank[{i}].rank"), low_rank.rank)?;
            size(&format!("{path}.low_rank[{i}].outputs (their number)"), low_rank.outputs.len())?;
        }
        self.mixer.check(&format!("{path}.mixer"), ropes, hidden_size)
    }
}
