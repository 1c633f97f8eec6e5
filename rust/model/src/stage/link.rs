//! Connection between the process that schedules and a stage in another process: frames over a socket.
//!
//! The worker begins with a description of its stage ([`StageInfo`], JSON after its length). It then answers requests
//! of the same kind in order. It looks up tokens while it computes, and computes logits before the steps that wait, because
//! an older batch needs them. Numbers are little-endian; hidden states are as in memory, because all processes have one
//! instruction set.
//!
//! | frame | words of 32 bits | then |
//! |---|---|---|
//! | request to allocate | 0, number of groups, 0 | number of pages of each group, words of 64 bits |
//! | request to run a step | 1, bytes of the step, numbers of hidden states | [`StageStep`], hidden states |
//! | request to look up the worker's tokens in the embedding | 2, number of tokens, 0 | token ids, words of 32 bits |
//! | request to compute the logits of the worker's tokens | 3, numbers of all rows, 0 | rows that the last stage wrote |
//! | answer | 0, numbers of output | output; only of rank 0 |
//! | answer to a look-up | 3, numbers of the rows | rows |
//! | logits, also after the answer of the last stage to a step | 4, numbers of the logits | logits |
//! | failure, after which the worker ends | 1, bytes of the message | message |
//! | loss of another worker of the stage, after which this one ends | 2, its rank | |

use std::collections::VecDeque;
use std::io::{self, BufReader, BufWriter, Read, Write};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Mutex, PoisonError, mpsc};
use std::time::{Duration, Instant};

use ferrule_kernels::{ARITHMETIC_VERSION, Cancel};
use serde::{Deserialize, Serialize};

use super::{Stage, StageRunError, StageStep, StepError};

/// Upper limit for the bytes of a description or message, far above those of any stage.
const MAX_TEXT: u32 = 1 << 20;

/// Interval at which a wait for an answer looks whether it is cancelled.
pub(super) const POLL: Duration = Duration::from_millis(50);

/// Time after a cancellation in which a stage must answer. The step in progress is completed, so that the stages stay
/// alike.
pub(super) const CANCEL_LIMIT: Duration = Duration::from_secs(10);

const ALLOCATE: u32 = 0;
const STEP: u32 = 1;
const LOOK_UP: u32 = 2;
const LOGITS: u32 = 3;
const ANSWER: u32 = 0;
const FAILURE: u32 = 1;
const RANK_LOST: u32 = 2;
const LOOKED_UP: u32 = 3;
const COMPUTED_LOGITS: u32 = 4;

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
    /// Instruction set.
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
            isa: options.isa.name().to_owned(),
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

/// A request that a worker has received.
enum Request {
    Allocate(Vec<usize>),
    Step(StageStep, Vec<f32>),
    LookUp(Vec<u32>),
    Logits(Vec<f32>),
}

/// Answer of a stage.
pub(super) enum Answer {
    /// Output of a step, or nothing after an allocation.
    Output(Vec<f32>),
    /// Rows of the tokens that were looked up.
    LookedUp(Vec<f32>),
    /// Logits of the worker's tokens.
    Logits(Vec<f32>),
}

/// Runs a stage for the process at the other end of a connection, until that ends it. A thread receives requests while
/// the stage computes, so that the other end never waits to send, and another one looks up tokens. When the connection
/// ends, `cancel` is set, so that the stage does not wait for other workers.
///
/// # Errors
/// [`LinkError`] for a request that failed, which is also reported to the other end, and for a connection that ends
/// within a frame. The connection has ended then.
pub fn serve_stage(stage: &mut Stage, kv_budget: u64, stream: &UnixStream, cancel: &Cancel) -> Result<(), LinkError> {
    let (mut reader, mut writer) = (BufReader::new(stream), BufWriter::new(stream));
    let info =
        serde_json::to_vec(&StageInfo::new(stage, kv_budget)).expect("a description consists of numbers and names");
    writer.write_all(&(info.len() as u32).to_le_bytes())?;
    writer.write_all(&info)?;
    writer.flush()?;
    let (width, limits, token_rows) = (stage.input_width(), stage.kv_groups().len(), stage.token_rows());
    let writer = &Mutex::new(writer);
    std::thread::scope(|scope| {
        let (look_ups, tokens) = mpsc::channel::<Vec<u32>>();
        let looking_up = scope.spawn(move || {
            let served = tokens.into_iter().try_for_each(|tokens| {
                send_answer(writer, LOOKED_UP, caught(|| token_rows.read(&tokens).map_err(worker_error)))
            });
            if served.is_err() {
                let _ = stream.shutdown(Shutdown::Both);
            }
            served
        });
        let (sender, requests) = mpsc::channel();
        scope.spawn(move || {
            loop {
                let request = receive_request(&mut reader, width, limits).transpose();
                let ends = !matches!(request, Some(Ok(_)));
                let is_sent = match request {
                    Some(Ok(Request::LookUp(tokens))) => look_ups.send(tokens).is_ok(),
                    Some(request) => sender.send(request).is_ok(),
                    None => false,
                };
                if ends || !is_sent {
                    cancel.cancel();
                    return;
                }
            }
        });
        let mut buffers = [Vec::new(), Vec::new()];
        let mut requests = logits_first(&requests);
        let served = requests.try_for_each(|request| answer(stage, request, cancel, writer, &mut buffers));
        // The threads that receive and look up must not wait for another request.
        let _ = stream.shutdown(Shutdown::Both);
        // What fails first closes the connection for the other.
        match (served, looking_up.join().expect("panics are caught")) {
            (Err(LinkError::Io(_)), Err(cause)) => Err(cause),
            (served, looked_up) => served.and(looked_up),
        }
    })
}

/// Returns the requests that arrive: those that wait for logits first, then the others in their order.
fn logits_first(
    requests: &mpsc::Receiver<Result<Request, LinkError>>,
) -> impl Iterator<Item = Result<Request, LinkError>> {
    let mut waiting = VecDeque::new();
    std::iter::from_fn(move || {
        if waiting.is_empty() {
            waiting.extend(requests.recv());
        }
        waiting.extend(requests.try_iter());
        let urgent = waiting.iter().position(|request| matches!(request, Ok(Request::Logits(_))));
        waiting.remove(urgent.unwrap_or(0))
    })
}

/// Sends the numbers of an answer, or the error in their place, and returns this error.
fn send_answer(
    writer: &Mutex<BufWriter<&UnixStream>>,
    kind: u32,
    numbers: Result<impl AsRef<[f32]>, LinkError>,
) -> Result<(), LinkError> {
    let writer = &mut *writer.lock().unwrap_or_else(PoisonError::into_inner);
    match &numbers {
        Ok(numbers) => {
            let numbers = numbers.as_ref();
            write_frame(writer, kind, numbers.len(), bytemuck::cast_slice(numbers))?;
        }
        Err(LinkError::RankLost { rank }) => write_frame(writer, RANK_LOST, *rank, &[])?,
        Err(error) => {
            let message = error.to_string();
            write_frame(writer, FAILURE, message.len(), message.as_bytes())?;
        }
    }
    numbers.map(drop)
}

/// Returns what a worker reports of an error.
fn failure(error: StageRunError) -> LinkError {
    match error {
        StageRunError::RankLost { rank } => LinkError::RankLost { rank },
        error => worker_error(error),
    }
}

/// Does what a request asks for, and sends the answer. After a step of the last stage, sends the logits too. The buffers
/// are reused from request to request, since logits are megabytes.
fn answer(
    stage: &mut Stage,
    request: Result<Request, LinkError>,
    cancel: &Cancel,
    writer: &Mutex<BufWriter<&UnixStream>>,
    [output, logits]: &mut [Vec<f32>; 2],
) -> Result<(), LinkError> {
    let (mut kind, mut has_logits) = (ANSWER, false);
    output.clear();
    let done = request.and_then(|request| {
        caught(|| match request {
            Request::Allocate(pages) => stage.allocate_kv(&pages).map_err(worker_error),
            Request::Step(step, input) => {
                has_logits = stage.continues_with_logits(&step);
                stage.step(&step, &input, cancel, output).map_err(failure)
            }
            Request::Logits(rows) => {
                kind = COMPUTED_LOGITS;
                stage.logits(&rows, cancel, logits).map_err(failure)
            }
            Request::LookUp(_) => unreachable!("another thread looks up tokens"),
        })
    });
    let done = done.map(|()| match kind {
        COMPUTED_LOGITS => &logits[..],
        // All workers of a stage have the same output.
        _ if stage.rank() > 0 => &[],
        _ => &output[..],
    });
    send_answer(writer, kind, done)?;
    if !has_logits {
        return Ok(());
    }
    let done = caught(|| stage.logits(output, cancel, logits).map_err(failure));
    send_answer(writer, COMPUTED_LOGITS, done.map(|()| &logits[..]))
}

/// Runs `work`; a panic is an error.
fn caught<T>(work: impl FnOnce() -> Result<T, LinkError>) -> Result<T, LinkError> {
    let done = catch_unwind(AssertUnwindSafe(work));
    done.unwrap_or_else(|_| Err(LinkError::Worker("the stage panicked".to_owned())))
}

/// Returns an error of the worker with the message of `error`.
fn worker_error(error: impl std::fmt::Display) -> LinkError {
    LinkError::Worker(error.to_string())
}

/// Receives a request for a stage that reads `width` numbers per token and has `groups` groups; `None` if the
/// connection ended between two requests.
fn receive_request(reader: &mut impl Read, width: usize, groups: usize) -> Result<Option<Request>, LinkError> {
    let mut kind = [0; 4];
    if reader.read(&mut kind[..1])? == 0 {
        return Ok(None);
    }
    reader.read_exact(&mut kind[1..])?;
    let [first, second] = [read_word(reader)? as usize, read_word(reader)? as usize];
    match u32::from_le_bytes(kind) {
        ALLOCATE if first == groups => {
            let mut pages = vec![[0; 8]; groups];
            reader.read_exact(pages.as_flattened_mut())?;
            let pages = pages.into_iter().map(|pages| usize::try_from(u64::from_le_bytes(pages)).unwrap_or(usize::MAX));
            Ok(Some(Request::Allocate(pages.collect())))
        }
        STEP => {
            let step = StageStep::from_bytes(&read_bytes(reader, first)?);
            let step = step.map_err(|error: StepError| LinkError::Protocol(error.to_string()))?;
            let tokens: usize = step.sequences.iter().map(|sequence| sequence.tokens.len()).sum();
            let expected = tokens.saturating_mul(width);
            if second != expected {
                let what = format!("{second} hidden states for {tokens} tokens, not {expected}");
                return Err(LinkError::Protocol(what));
            }
            let mut input = vec![0.0; expected];
            reader.read_exact(bytemuck::cast_slice_mut(&mut input))?;
            Ok(Some(Request::Step(step, input)))
        }
        LOOK_UP if second == 0 => {
            let bytes = read_bytes(reader, first.saturating_mul(size_of::<u32>()))?;
            let (tokens, _) = bytes.as_chunks();
            Ok(Some(Request::LookUp(tokens.iter().map(|token| u32::from_le_bytes(*token)).collect())))
        }
        LOGITS if second == 0 => Ok(Some(Request::Logits(read_numbers(reader, first)?))),
        kind => Err(LinkError::Protocol(format!("request {kind} with {first} and {second}"))),
    }
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
        self.receive(cancel).map(drop)
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

    /// Sends rows whose logits of the worker's tokens are computed; the answer is received later.
    pub(super) fn send_logits(&mut self, rows: &[f32]) -> Result<(), LinkError> {
        self.send(LOGITS, rows.len(), 0, &[bytemuck::cast_slice(rows)])
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

    /// Receives the next answer. After a cancellation it waits for 10 s.
    pub(super) fn receive(&mut self, cancel: &Cancel) -> Result<Answer, LinkError> {
        let reader = &mut Waiting::new(&mut self.reader, cancel);
        match read_word(reader)? {
            ANSWER => {
                let count = read_word(reader)? as usize;
                Ok(Answer::Output(read_numbers(reader, count)?))
            }
            LOOKED_UP => {
                let count = read_word(reader)? as usize;
                Ok(Answer::LookedUp(read_numbers(reader, count)?))
            }
            COMPUTED_LOGITS => {
                let count = read_word(reader)? as usize;
                Ok(Answer::Logits(read_numbers(reader, count)?))
            }
            RANK_LOST => Err(LinkError::RankLost { rank: read_word(reader)? as usize }),
            FAILURE => Err(LinkError::Worker(String::from_utf8_lossy(&read_text(reader)?).into_owned())),
            kind => Err(LinkError::Protocol(format!("answer {kind}"))),
        }
    }
}

/// Reader of a socket with a timeout of [`POLL`], which goes on after timeouts until `limit` after a cancellation.
struct Waiting<'a> {
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

fn to_word(number: usize) -> Result<u32, LinkError> {
    u32::try_from(number).map_err(|_| LinkError::Protocol(format!("{number} exceeds 32 bits")))
}

fn write_frame(writer: &mut impl Write, kind: u32, count: usize, bytes: &[u8]) -> Result<(), LinkError> {
    writer.write_all(&kind.to_le_bytes())?;
    writer.write_all(&to_word(count)?.to_le_bytes())?;
    writer.write_all(bytes)?;
    Ok(writer.flush()?)
}

fn read_word(reader: &mut impl Read) -> Result<u32, LinkError> {
    let mut word = [0; 4];
    reader.read_exact(&mut word)?;
    Ok(u32::from_le_bytes(word))
}

/// Reads `count` bytes; allocates no more than have arrived, so that a false count costs nothing.
fn read_bytes(reader: &mut impl Read, count: usize) -> Result<Vec<u8>, LinkError> {
    let mut bytes = Vec::new();
    reader.take(count as u64).read_to_end(&mut bytes)?;
    if bytes.len() < count {
        return Err(io::Error::from(io::ErrorKind::UnexpectedEof).into());
    }
    Ok(bytes)
}

/// Reads `count` numbers in place, since logits of a batch are megabytes; allocates little more than have arrived.
fn read_numbers(reader: &mut impl Read, count: usize) -> Result<Vec<f32>, LinkError> {
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
    use std::num::NonZeroUsize;
    use std::sync::Arc;

    use ferrule_kernels::Pool;
    use ferrule_kernels::arch::Isa;
    use ferrule_kernels::kv::KvFormat;

    use super::*;
    use crate::batch::{Batch, LogitRows, SequenceChunk};
    use crate::quantization::Quantization;
    use crate::spec::ModelSpec;
    use crate::specs;
    use crate::stage::{LastOutput, StagePart, TensorParallelGroup};
    use crate::transformer::LoadOptions;
    use crate::weights::Source;

    fn spec() -> ModelSpec {
        ModelSpec::from_json(&specs::llama(96, 2).to_string()).unwrap()
    }

    /// Loads a stage that has all layers, and the last of `stages` parts of the vocabulary.
    fn load(stages: usize, group: Option<TensorParallelGroup>) -> Stage {
        let quantization = Quantization::named("int8").unwrap();
        let options = LoadOptions { quantization, kv_format: KvFormat::F16, isa: Isa::best() };
        let part = StagePart { layers: 0..2, stage: stages - 1, stages, group };
        let pool = Arc::new(Pool::new(NonZeroUsize::MIN));
        Stage::load(spec(), part, Source::Random, options, pool, &Cancel::new(), &mut |_, _| {}).unwrap()
    }

    /// Returns the bytes of a step with one prompt.
    fn step() -> Vec<u8> {
        let prompt = SequenceChunk {
            tokens: &[3, 1, 4],
            first_position: 0,
            prompt_len: 3,
            pages: &[vec![0]],
            token_types: &[],
            logits: LogitRows::Last,
            adapter: None,
        };
        StageStep::new(Batch { sequences: &[prompt] }, Vec::new(), LastOutput::Logits).to_bytes()
    }

    #[test]
    fn steps_look_ups_and_logits_have_answers_of_their_own() {
        let (ours, theirs) = UnixStream::pair().unwrap();
        std::thread::spawn(move || serve_stage(&mut load(2, None), 1 << 20, &theirs, &Cancel::new()));
        let mut link = StageLink::open(ours, &Cancel::new()).unwrap();
        assert_eq!((link.info().first_token, link.info().end_token), (48, 96));
        let width = spec().embedding_width();
        link.allocate_kv(&[4], &Cancel::new()).unwrap();
        link.send_step(&step(), &vec![0.5; 3 * width]).unwrap();
        link.send_look_up(&[48, 95]).unwrap();
        link.send_logits(&vec![0.25; 2 * width]).unwrap();
        let mut sizes = [Vec::new(), Vec::new(), Vec::new()];
        for _ in 0..4 {
            let (kind, numbers) = match link.receive(&Cancel::new()).unwrap() {
                Answer::Output(rows) => (0, rows),
                Answer::LookedUp(rows) => (1, rows),
                Answer::Logits(logits) => (2, logits),
            };
            sizes[kind].push(numbers.len());
        }
        // The logits of the step follow its hidden states; the other ones come first if their request is there in time.
        sizes[2].sort_unstable();
        assert_eq!(sizes, [vec![width], vec![2 * width], vec![48, 2 * 48]]);
        link.send_look_up(&[95, 96]).unwrap();
        let error = link.receive(&Cancel::new()).err().unwrap().to_string();
        assert!(error.contains("tokens[1] must be in 48..96, the rows of this worker, got 96"), "{error}");
        assert!(link.receive(&Cancel::new()).is_err(), "the worker has ended");
    }

    #[test]
    fn logits_are_computed_before_the_steps_that_wait() {
        let (sender, requests) = mpsc::channel();
        let step = || Request::Step(StageStep::from_bytes(&step()).unwrap(), Vec::new());
        for request in [step(), Request::Logits(vec![1.0]), step(), Request::Logits(vec![2.0])] {
            sender.send(Ok(request)).unwrap();
        }
        drop(sender);
        let name = |request| match request {
            Ok(Request::Logits(rows)) => format!("{rows:?}"),
            Ok(Request::Step(..)) => "step".to_owned(),
            _ => "another request".to_owned(),
        };
        let order: Vec<String> = logits_first(&requests).map(name).collect();
        assert_eq!(order, ["[1.0]", "[2.0]", "step", "step"]);
    }

    #[test]
    fn a_worker_that_waits_for_another_ends_with_the_connection_to_the_engine() {
        let (ours, theirs) = UnixStream::pair().unwrap();
        // The other rank never answers.
        let (peer, silent) = UnixStream::pair().unwrap();
        let (ended, end) = mpsc::channel();
        std::thread::spawn(move || {
            let mut stage = load(1, Some(TensorParallelGroup::new(0, vec![peer]).unwrap()));
            ended.send(serve_stage(&mut stage, 1 << 20, &theirs, &Cancel::new())).unwrap();
        });
        let mut link = StageLink::open(ours, &Cancel::new()).unwrap();
        link.allocate_kv(&[4], &Cancel::new()).unwrap();
        link.send_step(&step(), &[]).unwrap();
        assert!(end.recv_timeout(Duration::from_millis(300)).is_err(), "the worker waits for the other rank");
        drop(link);
        let served = end.recv_timeout(Duration::from_secs(60)).expect("the worker ends");
        assert!(served.is_err());
        drop(silent);
    }

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
