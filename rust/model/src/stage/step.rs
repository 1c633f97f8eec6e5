//! [`StageStep`]: one step of all stages as bytes, for stages in other processes.
//!
//! The bytes are little-endian words of 32 bits:
//!
//! | words | contents |
//! |---|---|
//! | 2 | `FSTP`, then [`FORMAT_VERSION`] |
//! | 3 | output of the last stage, number of page copies, number of sequences |
//! | 3 per copy | group, page that is read, page that is written |
//! | 6 per sequence | numbers of tokens, token types and groups, first position, prompt length, wanted logits |
//! | per sequence | tokens, token types, then for each group the number of pages and the pages |
//!
//! Wanted logits are those of no row (0), the first one (1), the last one (2), all rows (3), or the largest of the last one
//! (4).

use std::collections::BTreeSet;

use ferrule_kernels::kv::{PAGE_TOKENS, PageId};

use super::LastOutput;
use crate::batch::{Batch, Capabilities, KvGroup, LogitRows, SequenceChunk};

/// First word of the bytes.
const MAGIC: u32 = u32::from_le_bytes(*b"FSTP");

/// Version of the bytes; the processes of a pipeline must have the same.
const FORMAT_VERSION: u32 = 2;

/// One step of all stages: page copies, then a batch.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StageStep {
    /// Pages that are copied before the batch, in order.
    pub copies: Vec<PageCopy>,
    /// Chunks of different sequences.
    pub sequences: Vec<StageSequence>,
    /// Numbers that the last stage writes.
    pub last: LastOutput,
}

/// Copy of a page of a group, in all of its layers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PageCopy {
    /// Index of the group.
    pub group: usize,
    /// Page that is read.
    pub from: PageId,
    /// Page that is written.
    pub to: PageId,
}

/// A [`SequenceChunk`] that owns its tokens and pages.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StageSequence {
    /// Token ids.
    pub tokens: Vec<u32>,
    /// Position of the first token.
    pub first_position: usize,
    /// Number of prompt tokens of the sequence.
    pub prompt_len: usize,
    /// Pages of each group.
    pub pages: Vec<Vec<PageId>>,
    /// Type of each token; empty if all are of type 0.
    pub token_types: Vec<u32>,
    /// Rows whose logits or hidden states are computed.
    pub logits: LogitRows,
}

/// A step is invalid.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum StepError {
    /// The bytes are not a step.
    #[error("stage step must begin with FSTP and be whole words of 4 bytes, got {bytes} bytes")]
    Format {
        /// Number of bytes.
        bytes: usize,
    },
    /// The step is of another version.
    #[error("stage step must have format version {FORMAT_VERSION}, got {found} (all workers need the same ferrule)")]
    Version {
        /// Version found.
        found: u32,
    },
    /// The bytes end too early.
    #[error("stage step ends within {field}, which needs {needs} more words, got {left}")]
    Truncated {
        /// Field that is incomplete.
        field: &'static str,
        /// Words that the field needs.
        needs: usize,
        /// Words that are left.
        left: usize,
    },
    /// The bytes go on after the last sequence.
    #[error("stage step must end after its last sequence, got {words} more words")]
    Trailing {
        /// Number of words.
        words: usize,
    },
    /// A number is outside its limits.
    #[error("stage step: {field} must be {limit}, got {value}")]
    Number {
        /// Path of the field.
        field: String,
        /// Number found.
        value: usize,
        /// Numbers that are allowed.
        limit: String,
    },
}

/// Limits of the numbers in a step, from the model and its memory.
pub(super) struct StepLimits<'a> {
    pub groups: &'a [KvGroup],
    /// Number of pages of each group.
    pub pages: &'a [usize],
    pub vocab_size: usize,
    pub positions: usize,
    pub capabilities: Capabilities,
}

impl StageStep {
    /// Creates the step of a batch.
    ///
    /// # Panics
    /// If a sequence has an adapter, which stages do not support.
    #[must_use]
    pub fn new(batch: Batch<'_>, copies: Vec<PageCopy>, last: LastOutput) -> Self {
        assert!(batch.sequences.iter().all(|chunk| chunk.adapter.is_none()), "pipeline stages do not support adapters");
        let sequences = batch.sequences.iter().map(|chunk| StageSequence {
            tokens: chunk.tokens.to_vec(),
            first_position: chunk.first_position,
            prompt_len: chunk.prompt_len,
            pages: chunk.pages.to_vec(),
            token_types: chunk.token_types.to_vec(),
            logits: chunk.logits,
        });
        Self { copies, sequences: sequences.collect(), last }
    }

    /// Returns the chunks of the batch.
    #[must_use]
    pub fn chunks(&self) -> Vec<SequenceChunk<'_>> {
        let chunks = self.sequences.iter().map(|sequence| SequenceChunk {
            tokens: &sequence.tokens,
            first_position: sequence.first_position,
            prompt_len: sequence.prompt_len,
            pages: &sequence.pages,
            token_types: &sequence.token_types,
            features: &[],
            logits: sequence.logits,
            adapter: None,
        });
        chunks.collect()
    }

    /// Returns the step as bytes.
    ///
    /// # Panics
    /// If a number exceeds 32 bits, which no number of a batch that fits in memory does.
    #[must_use]
    pub fn to_bytes(&self) -> Vec<u8> {
        let word = |number: usize| u32::try_from(number).expect("a number of a step fits in 32 bits");
        let last = match self.last {
            LastOutput::Logits => 0,
            LastOutput::HiddenStates => 1,
        };
        let mut words = vec![MAGIC, FORMAT_VERSION, last, word(self.copies.len()), word(self.sequences.len())];
        for &PageCopy { group, from, to } in &self.copies {
            words.extend([word(group), from, to]);
        }
        for StageSequence { tokens, first_position, prompt_len, pages, token_types, logits } in &self.sequences {
            let wanted = match logits {
                LogitRows::None => 0,
                LogitRows::First => 1,
                LogitRows::Last => 2,
                LogitRows::All => 3,
                LogitRows::LastLargest => 4,
            };
            let numbers = [tokens.len(), token_types.len(), pages.len(), *first_position, *prompt_len, wanted];
            words.extend(numbers.map(word));
            words.extend(tokens.iter().chain(token_types));
            for pages in pages {
                words.push(word(pages.len()));
                words.extend(pages);
            }
        }
        words.iter().flat_map(|word| word.to_le_bytes()).collect()
    }

    /// Reads a step from bytes. Its numbers are checked where it runs, because their limits depend on the model.
    ///
    /// # Errors
    /// [`StepError`] if the bytes are no step.
    pub fn from_bytes(bytes: &[u8]) -> Result<Self, StepError> {
        let (words, rest) = bytes.as_chunks();
        let mut words = Words(words);
        if !rest.is_empty() || words.next("the header") != Ok(MAGIC) {
            return Err(StepError::Format { bytes: bytes.len() });
        }
        let found = words.next("the header")?;
        if found != FORMAT_VERSION {
            return Err(StepError::Version { found });
        }
        let last = match words.number("the header")? {
            0 => LastOutput::Logits,
            1 => LastOutput::HiddenStates,
            value => return Err(number("last", value, "0 (logits) or 1 (hidden states)")),
        };
        let (copies, sequences) = (words.number("the header")?, words.number("the header")?);
        let copies = words.groups("copies", copies)?.iter().map(|[group, from, to]| PageCopy {
            group: u32::from_le_bytes(*group) as usize,
            from: u32::from_le_bytes(*from),
            to: u32::from_le_bytes(*to),
        });
        let mut step = Self { copies: copies.collect(), sequences: Vec::new(), last };
        for index in 0..sequences {
            step.sequences.push(words.sequence(index)?);
        }
        match words.0.len() {
            0 => Ok(step),
            words => Err(StepError::Trailing { words }),
        }
    }

    /// Checks all numbers.
    pub(super) fn check(&self, limits: &StepLimits<'_>) -> Result<(), StepError> {
        let mut written = BTreeSet::new();
        for (i, &PageCopy { group, from, to }) in self.copies.iter().enumerate() {
            let path = format!("copies[{i}]");
            below(&format!("{path}.group"), group, limits.groups.len())?;
            limits.check_page(&format!("{path}.from"), group, from)?;
            limits.check_page(&format!("{path}.to"), group, to)?;
        }
        for (i, sequence) in self.sequences.iter().enumerate() {
            let path = format!("sequences[{i}]");
            sequence.check(&path, limits, &mut written)?;
            if self.last == LastOutput::Logits && !limits.capabilities.logits && sequence.logits != LogitRows::None {
                return Err(number("last", 0, "1 (hidden states) for a model without an lm_head"));
            }
        }
        Ok(())
    }
}

impl StageSequence {
    /// Checks the numbers at `path`; `written` has the pages that earlier sequences write, with their groups.
    fn check(
        &self,
        path: &str,
        limits: &StepLimits<'_>,
        written: &mut BTreeSet<(usize, PageId)>,
    ) -> Result<(), StepError> {
        let Self { tokens, first_position: first, pages, token_types, .. } = self;
        let field = |name: &str| format!("{path}.{name}");
        if tokens.is_empty() {
            return Err(number(&field("tokens (their number)"), 0, "at least 1"));
        }
        let room = limits.positions.saturating_sub(tokens.len());
        if *first > room {
            return Err(number(
                &field("first_position"),
                *first,
                &format!("at most {room} for {} tokens", tokens.len()),
            ));
        }
        for (i, token) in tokens.iter().enumerate() {
            below(&field(&format!("tokens[{i}]")), *token as usize, limits.vocab_size)?;
        }
        if !token_types.is_empty() && token_types.len() != tokens.len() {
            let limit = format!("0 or {}, the number of tokens", tokens.len());
            return Err(number(&field("token_types (their number)"), token_types.len(), &limit));
        }
        for (i, kind) in token_types.iter().enumerate() {
            below(&field(&format!("token_types[{i}]")), *kind as usize, limits.capabilities.token_types)?;
        }
        if pages.len() != limits.groups.len() {
            let limit = format!("{}, the number of groups of the model", limits.groups.len());
            return Err(number(&field("pages (their number)"), pages.len(), &limit));
        }
        for (group, pages) in pages.iter().enumerate() {
            let path = field(&format!("pages[{group}]"));
            let needed = if limits.groups[group].is_state() { 2 } else { (first + tokens.len()).div_ceil(PAGE_TOKENS) };
            if pages.len() < needed {
                return Err(number(&format!("{path} (their number)"), pages.len(), &format!("at least {needed}")));
            }
            let (read, writes) = self.used(&limits.groups[group], pages.len());
            for index in read.into_iter().chain(writes.clone()) {
                limits.check_page(&format!("{path}[{index}]"), group, pages[index])?;
            }
            for index in writes {
                if !written.insert((group, pages[index])) {
                    let limit = "a page that no other sequence writes";
                    return Err(number(&format!("{path}[{index}]"), pages[index] as usize, limit));
                }
            }
        }
        Ok(())
    }

    /// Returns the indices of the pages that are read and of those that are written, of `count` pages in a group.
    fn used(&self, group: &KvGroup, count: usize) -> (Vec<usize>, Vec<usize>) {
        let (first, end) = (self.first_position, self.first_position + self.tokens.len());
        if !group.is_state() {
            let oldest = group.window().map_or(0, |window| (first + 1).saturating_sub(window));
            return (
                (oldest / PAGE_TOKENS..first / PAGE_TOKENS).collect(),
                (first / PAGE_TOKENS..end.div_ceil(PAGE_TOKENS)).collect(),
            );
        }
        let boundary = end / PAGE_TOKENS * PAGE_TOKENS;
        let has_snapshot = count > 2 && (first + 1..end).contains(&boundary);
        let read = if first > 0 { vec![0] } else { Vec::new() };
        (read, if has_snapshot { vec![1, 2] } else { vec![1] })
    }
}

impl StepLimits<'_> {
    fn check_page(&self, field: &str, group: usize, page: PageId) -> Result<(), StepError> {
        below(field, page as usize, self.pages.get(group).copied().unwrap_or(0))
    }
}

/// The words of a step that are not read yet.
struct Words<'a>(&'a [[u8; 4]]);

impl<'a> Words<'a> {
    fn take(&mut self, field: &'static str, count: usize) -> Result<&'a [[u8; 4]], StepError> {
        let left = self.0.len();
        let (taken, rest) = self.0.split_at_checked(count).ok_or(StepError::Truncated { field, needs: count, left })?;
        self.0 = rest;
        Ok(taken)
    }

    fn next(&mut self, field: &'static str) -> Result<u32, StepError> {
        Ok(u32::from_le_bytes(self.take(field, 1)?[0]))
    }

    fn number(&mut self, field: &'static str) -> Result<usize, StepError> {
        Ok(self.next(field)? as usize)
    }

    /// Returns `count` groups of `N` words.
    fn groups<const N: usize>(&mut self, field: &'static str, count: usize) -> Result<&'a [[[u8; 4]; N]], StepError> {
        Ok(self.take(field, count.saturating_mul(N))?.as_chunks().0)
    }

    fn list(&mut self, field: &'static str, count: usize) -> Result<Vec<u32>, StepError> {
        Ok(self.take(field, count)?.iter().map(|word| u32::from_le_bytes(*word)).collect())
    }

    fn sequence(&mut self, index: usize) -> Result<StageSequence, StepError> {
        let [numbers] = self.groups::<6>("a sequence", 1)? else { unreachable!("one group is read") };
        let [tokens, types, groups, first_position, prompt_len, wanted] =
            numbers.map(|word| u32::from_le_bytes(word) as usize);
        let logits = match wanted {
            0 => LogitRows::None,
            1 => LogitRows::First,
            2 => LogitRows::Last,
            3 => LogitRows::All,
            4 => LogitRows::LastLargest,
            value => {
                let limit = "0 (none), 1 (first), 2 (last), 3 (all) or 4 (largest of the last)";
                return Err(number(&format!("sequences[{index}].logits"), value, limit));
            }
        };
        let (tokens, token_types) = (self.list("tokens", tokens)?, self.list("token_types", types)?);
        let mut pages = Vec::new();
        for _ in 0..groups {
            let count = self.number("pages")?;
            pages.push(self.list("pages", count)?);
        }
        Ok(StageSequence { tokens, first_position, prompt_len, pages, token_types, logits })
    }
}

pub(super) fn number(field: &str, value: usize, limit: &str) -> StepError {
    StepError::Number { field: field.to_owned(), value, limit: limit.to_owned() }
}

fn below(field: &str, value: usize, limit: usize) -> Result<(), StepError> {
    if value < limit { Ok(()) } else { Err(number(field, value, &format!("below {limit}"))) }
}
