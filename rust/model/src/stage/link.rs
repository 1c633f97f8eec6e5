//! Connection between the process that schedules and a stage in another process: frames over a socket, and the end that
//! sends requests. The worker's end is in [`serve`](super::serve).
//!
//! The worker begins with a description of its stage ([`StageInfo`], JSON after its length). It then answers requests
//! of the same kind in order. It looks up tokens while it computes, and computes logits before the steps that wait, because
//! an older batch needs them. Numbers are little-endian; hidden states are as in memory, because all processes have one
//! instruction set.
//!
//! | frame | words of 32 bits | then |
//! |---|---|---|
//! | request to allocate | 0, number of groups, 0 | number of pages of each group, words of 64 bits |
//! | request to run a step | 1, bytes of the step, numbers of hidden states | [`StageStep`](super::StageStep), hidden states |
//! | request to look up the worker's tokens in the embedding | 2, number of tokens, 0 | token ids, words of 32 bits |
//! | request to compute the logits of the worker's tokens | 3, numbers of all rows, number of rows | needed logits of each row (0: all, 1: the largest), words of 32 bits, then the rows that the last stage wrote |
//! | answer | 0, numbers of output | output; only of rank 0 |
//! | answer to a look-up | 3, numbers of the rows | rows |
//! | logits, also after the answer of the last stage to a step | 4, number of words | words of [`logit_words`](super::logit_words) |
//! | failure, after which the worker ends | 1, bytes of the message | message |
//! | loss of another worker of the stage, after which this one ends | 2, its rank | |

use std::io::{self, BufReader, BufWriter, Read, Write};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use ferrule_kernels::{ARITHMETIC_VERSION, Cancel};
use serde::{Deserialize, Serialize};

use super::Stage;

/// Upper limit for the bytes of a description or message, far above those of any stage.
const MAX_TEXT: u32 = 1 << 20;

/// Interval at which a wait for an answer looks whether it is cancelled.
pub(super) const POLL: Duration = Duration::from_millis(50);

/// Time after a cancellation in which a stage must answer. The step in progress is completed, so that the stages stay
/// alike.
pub(super) const CANCEL_LIMIT: Duration = Duration::from_secs(10);

pub(super) const ALLOCATE: u32 = 0;
pub(super) const STEP: u32 = 1;
pub(super) const LOOK_UP: u32 = 2;
pub(super) const LOGITS: u32 = 3;
pub(super) const ANSWER: u32 = 0;
pub(super) const FAILURE: u32 = 1;
pub(super) const RANK_LOST: u32 = 2;
pub(super) const LOOKED_UP: u32 = 3;
pub(super) const COMPUTED_LOGITS: u32 = 4;

/// A stage failed or cannot be reached.
#[derive(Debug, thiserror::Error)]
pub enum LinkError {
    /// The connection ended.
    #[error("the connection ended: {0}")]
    Io(#[from] io::Error),
    /// The other end sent something that is not in the protocol.
    #[error("the other end does not follow the protocol: {0}")]
    Protocol(String),
    /// The worker could not do what was requested.
    #[error("{0}")]
    Worker(String),
    /// The worker has lost another one that divides matrices with it.
    #[error("the connection to tensor-parallel rank {rank} ended")]
    RankLost {
        /// Rank of the other worker.
        rank: usize,
    },
}

/// Description of a stage, which the worker sends first.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct StageInfo {
    /// Version of ferrule.
    pub version: String,
    /// Version of the arithmetic of the kernels.
    pub arithmetic: u32,
    /// Instruction set, or the slower one that computes the same bits.
    pub isa: String,
    /// Format of the weights.
    pub quantization: String,
    /// Format of keys and values.
    pub kv_format: String,
    /// First layer.
    pub first: usize,
    /// Layer after the last one.
    pub end: usize,
    /// First token whose row of the embedding and the lm_head the worker has, if they are divided among stages.
    pub first_token: usize,
    /// Token after the last of those.
    pub end_token: usize,
    /// Rank among the workers that divide the rows of the matrices.
    pub rank: usize,
    /// Number of those workers.
    pub ranks: usize,
    /// Fingerprint of the system's math library, in hexadecimal digits.
    pub math_fingerprint: String,
    /// Fingerprint of what each of those workers has of the model (all but the matrices), in hexadecimal digits.
    pub shared_fingerprint: String,
    /// Bytes of a page of each group.
    pub page_bytes: Vec<u64>,
    /// Bytes of the weights and vectors.
    pub weight_bytes: u64,
    /// Bytes that the worker has for pages.
    pub kv_budget: u64,
}

impl StageInfo {
    /// Describes a stage whose pages may have `kv_budget` bytes.
    #[must_use]
    pub fn new(stage: &Stage, kv_budget: u64) -> Self {
        let (layers, tokens, sizes, options) =
            (stage.layers(), stage.own_tokens(), stage.weight_sizes(), stage.options());
        Self {
            version: env!("CARGO_PKG_VERSION").to_owned(),
            arithmetic: ARITHMETIC_VERSION,
            isa: options.isa.arithmetic_name().to_owned(),
            quantization: options.quantization.name().to_owned(),
            kv_format: options.kv_format.name().to_owned(),
            first: layers.start,
            end: layers.end,
            first_token: tokens.start,
            end_token: tokens.end,
            rank: stage.rank(),
            ranks: stage.ranks(),
            math_fingerprint: hex(stage.math_fingerprint()),
            shared_fingerprint: hex(stage.shared_fingerprint()),
            page_bytes: stage.kv_groups().iter().map(|group| group.page_bytes).collect(),
            weight_bytes: sizes.weight_bytes + sizes.vector_bytes,
            kv_budget,
        }
    }
}

fn hex(fingerprint: [u8; 32]) -> String {
    blake3::Hash::from_bytes(fingerprint).to_hex().to_string()
}

/// Answer of a stage, whose words follow.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Answer {
    pub kind: AnswerKind,
    /// Number of words of 32 bits.
    pub words: usize,
}

/// Kind of an answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum AnswerKind {
    /// Output of a step, or nothing after an allocation.
    Output,
    /// Rows of the tokens that were looked up.
    LookedUp,
    /// Logits of the worker's tokens, as [`logit_words`](super::logit_words).
    Logits,
}

/// The end of a connection that sends requests.
pub struct StageLink {
    reader: BufReader<UnixStream>,
    writer: BufWriter<UnixStream>,
    info: StageInfo,
}

impl StageLink {
    /// Receives the description of the stage at the other end.
    ///
    /// # Errors
    /// [`LinkError`].
    pub fn open(stream: UnixStream, cancel: &Cancel) -> Result<Self, LinkError> {
        stream.set_read_timeout(Some(POLL))?;
        let (mut reader, writer) = (BufReader::new(stream.try_clone()?), BufWriter::new(stream));
        let info = read_text(&mut Waiting::new(&mut reader, cancel))?;
        let info = serde_json::from_slice(&info).map_err(|error| LinkError::Protocol(error.to_string()))?;
        Ok(Self { reader, writer, info })
    }

    /// Returns the description of the stage.
    #[must_use]
    pub fn info(&self) -> &StageInfo {
        &self.info
    }

    /// Allocates pages for each group, and waits until that is done.
    pub(super) fn allocate_kv(&mut self, pages: &[usize], cancel: &Cancel) -> Result<(), LinkError> {
        let bytes: Vec<u8> = pages.iter().flat_map(|pages| (*pages as u64).to_le_bytes()).collect();
        self.send(ALLOCATE, pages.len(), 0, &[&bytes])?;
        match self.receive(cancel)? {
            Answer { kind: AnswerKind::Output, words: 0 } => Ok(()),
            Answer { words, .. } => Err(LinkError::Protocol(format!("an answer of {words} words to an allocation"))),
        }
    }

    /// Sends a step; the answer is received later.
    pub(super) fn send_step(&mut self, step: &[u8], input: &[f32]) -> Result<(), LinkError> {
        self.send(STEP, step.len(), input.len(), &[step, bytemuck::cast_slice(input)])
    }

    /// Sends tokens whose rows of the embedding are looked up; the answer is received later.
    pub(super) fn send_look_up(&mut self, tokens: &[u32]) -> Result<(), LinkError> {
        let bytes: Vec<u8> = tokens.iter().flat_map(|token| token.to_le_bytes()).collect();
        self.send(LOOK_UP, tokens.len(), 0, &[&bytes])
    }

    /// Sends rows whose logits of the worker's tokens are computed, and words for the needed logits of each; the answer is
    /// received later.
    pub(super) fn send_logits(&mut self, rows: &[f32], needed: &[u32]) -> Result<(), LinkError> {
        self.send(LOGITS, rows.len(), needed.len(), &[bytemuck::cast_slice(needed), bytemuck::cast_slice(rows)])
    }

    fn send(&mut self, kind: u32, first: usize, second: usize, parts: &[&[u8]]) -> Result<(), LinkError> {
        for word in [kind, to_word(first)?, to_word(second)?] {
            self.writer.write_all(&word.to_le_bytes())?;
        }
        parts.iter().try_for_each(|part| self.writer.write_all(part))?;
        Ok(self.writer.flush()?)
    }

    /// Returns whether a part of the next answer was read from the socket already.
    pub(super) fn has_read_ahead(&self) -> bool {
        !self.reader.buffer().is_empty()
    }

    /// Returns the socket, which becomes readable when an answer arrives or the connection ends.
    pub(super) fn socket(&self) -> &UnixStream {
        self.reader.get_ref()
    }

    /// Receives the beginning of the next answer, whose words are read with [`StageLink::words`]. After a cancellation it
    /// waits for 10 s.
    pub(super) fn receive(&mut self, cancel: &Cancel) -> Result<Answer, LinkError> {
        let reader = &mut self.words(cancel);
        let kind = match read_word(reader)? {
            ANSWER => AnswerKind::Output,
            LOOKED_UP => AnswerKind::LookedUp,
            COMPUTED_LOGITS => AnswerKind::Logits,
            RANK_LOST => return Err(LinkError::RankLost { rank: read_word(reader)? as usize }),
            FAILURE => return Err(LinkError::Worker(String::from_utf8_lossy(&read_text(reader)?).into_owned())),
            kind => return Err(LinkError::Protocol(format!("answer {kind}"))),
        };
        Ok(Answer { kind, words: read_word(reader)? as usize })
    }

    /// Returns the reader of an answer's words. After a cancellation it waits for 10 s.
    pub(super) fn words<'a>(&'a mut self, cancel: &'a Cancel) -> Waiting<'a> {
        Waiting::new(&mut self.reader, cancel)
    }
}

/// Reader of a socket with a timeout of [`POLL`], which goes on after timeouts until `limit` after a cancellation.
pub(super) struct Waiting<'a> {
    reader: &'a mut BufReader<UnixStream>,
    cancel: &'a Cancel,
    cancelled: Option<Instant>,
    limit: Duration,
}

impl<'a> Waiting<'a> {
    fn new(reader: &'a mut BufReader<UnixStream>, cancel: &'a Cancel) -> Self {
        Self { reader, cancel, cancelled: None, limit: CANCEL_LIMIT }
    }
}

impl Read for Waiting<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        loop {
            match self.reader.read(buffer) {
                Err(error) if matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut) => {}
                done => return done,
            }
            if self.cancel.poll() && self.cancelled.get_or_insert_with(Instant::now).elapsed() > self.limit {
                return Err(no_answer(self.limit));
            }
        }
    }
}

/// Returns the error of a wait that was cancelled `limit` ago.
pub(super) fn no_answer(limit: Duration) -> io::Error {
    io::Error::other(format!("no answer in {limit:?} after the request was cancelled"))
}

pub(super) fn to_word(number: usize) -> Result<u32, LinkError> {
    u32::try_from(number).map_err(|_| LinkError::Protocol(format!("{number} exceeds 32 bits")))
}

pub(super) fn read_word(reader: &mut impl Read) -> Result<u32, LinkError> {
    let mut word = [0; 4];
    reader.read_exact(&mut word)?;
    Ok(u32::from_le_bytes(word))
}

/// Reads `count` bytes; allocates no more than have arrived, so that a false count costs nothing.
pub(super) fn read_bytes(reader: &mut impl Read, count: usize) -> Result<Vec<u8>, LinkError> {
    let mut bytes = Vec::new();
    reader.take(count as u64).read_to_end(&mut bytes)?;
    if bytes.len() < count {
        return Err(io::Error::from(io::ErrorKind::UnexpectedEof).into());
    }
    Ok(bytes)
}

/// Reads `count` numbers in place, since hidden states of a batch are megabytes; allocates little more than have arrived.
pub(super) fn read_numbers(reader: &mut impl Read, count: usize) -> Result<Vec<f32>, LinkError> {
    const AT_ONCE: usize = 1 << 18;
    let mut numbers = Vec::new();
    while numbers.len() < count {
        let first = numbers.len();
        numbers.resize(count.min(first + AT_ONCE), 0.0);
        reader.read_exact(bytemuck::cast_slice_mut(&mut numbers[first..]))?;
    }
    Ok(numbers)
}

/// Reads a text after its length.
fn read_text(reader: &mut impl Read) -> Result<Vec<u8>, LinkError> {
    let count = read_word(reader)?;
    if count > MAX_TEXT {
        return Err(LinkError::Protocol(format!("a text of {count} bytes, above the limit of {MAX_TEXT}")));
    }
    read_bytes(reader, count as usize)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_wait_for_a_stage_that_does_not_answer_ends_after_a_cancellation() {
        let (stream, mut other) = UnixStream::pair().unwrap();
        stream.set_read_timeout(Some(Duration::from_millis(1))).unwrap();
        let (mut reader, cancel) = (BufReader::new(stream), Cancel::new());
        std::thread::scope(|scope| {
            scope.spawn(|| {
                // Parts of a word that arrive after several timeouts are joined.
                for byte in 7_u32.to_le_bytes() {
                    std::thread::sleep(Duration::from_millis(5));
                    other.write_all(&[byte]).unwrap();
                }
            });
            assert_eq!(read_word(&mut Waiting::new(&mut reader, &cancel)).unwrap(), 7);
        });
        cancel.cancel();
        let limit = Duration::from_millis(20);
        let mut waiting = Waiting { limit, ..Waiting::new(&mut reader, &cancel) };
        let error = read_word(&mut waiting).unwrap_err().to_string();
        assert!(error.contains("no answer in 20ms after the request was cancelled"), "{error}");
    }
}
