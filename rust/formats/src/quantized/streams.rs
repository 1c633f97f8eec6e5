//! Streams of codes of a few bits, packed into 32-bit words with the lowest bits first.

use crate::tensor::Tensor;

/// Number of codes that are read at once; they fill whole words at any number of bits.
pub(super) const BLOCK: usize = 32;

/// Streams of codes. A code may span two words.
#[derive(Debug, Clone, Copy)]
pub(super) struct Streams<'a> {
    /// Word `word` of stream `stream` is element `stream * strides[0] + word * strides[1]`.
    pub words: Tensor<'a>,
    pub strides: [usize; 2],
    /// Words per stream.
    pub length: usize,
    /// Bits per code: 2, 3, 4 or 8.
    pub bits: u32,
}

impl Streams<'_> {
    /// Returns the number of words for `codes` codes.
    pub fn words_of(codes: usize, bits: u32) -> usize {
        (codes * bits as usize).div_ceil(32)
    }

    /// Returns a word, or 0 after the end of the stream.
    fn word(&self, stream: usize, word: usize) -> u32 {
        if word >= self.length {
            return 0;
        }
        word_at(self.words.bytes, stream * self.strides[0] + word * self.strides[1])
    }

    /// Returns a code.
    pub fn get(&self, stream: usize, index: usize) -> u32 {
        let bit = index * self.bits as usize;
        let (word, shift) = (bit / 32, bit % 32);
        let both = u64::from(self.word(stream, word)) | u64::from(self.word(stream, word + 1)) << 32;
        (both >> shift) as u32 & self.mask()
    }

    /// Returns a code of a stream whose codes are stored minus 1. If codes fill words exactly, 1 was subtracted from
    /// each code of a whole word, so that a 0 borrowed from its neighbour.
    pub fn get_plus_one(&self, stream: usize, index: usize) -> u32 {
        if 32 % self.bits != 0 {
            return (self.get(stream, index) + 1) & self.mask();
        }
        let per_word = (32 / self.bits) as usize;
        let ones = u32::MAX / self.mask();
        let word = self.word(stream, index / per_word).wrapping_add(ones);
        (word >> ((index % per_word) as u32 * self.bits)) & self.mask()
    }

    fn mask(&self) -> u32 {
        (1 << self.bits) - 1
    }

    /// Reads the codes of block `block` for consecutive streams from `first` on.
    pub fn read_block(&self, first: usize, block: usize, out: &mut [[u8; BLOCK]]) {
        match self.bits {
            2 => self.unpack::<2>(first, block, out),
            3 => self.unpack::<3>(first, block, out),
            4 => self.unpack::<4>(first, block, out),
            _ => self.unpack::<8>(first, block, out),
        }
    }

    fn unpack<const BITS: usize>(&self, first: usize, block: usize, out: &mut [[u8; BLOCK]]) {
        // The same word of neighbouring streams often shares a cache line, so streams are the inner loop.
        let mut words = [[0; BITS]; MOST];
        let words = &mut words[..out.len()];
        for word in 0..BITS {
            for (stream, words) in words.iter_mut().enumerate() {
                words[word] = self.word(first + stream, block * BITS + word);
            }
        }
        for (words, codes) in words.iter().zip(out) {
            for (index, code) in codes.iter_mut().enumerate() {
                let (word, shift) = (index * BITS / 32, index * BITS % 32);
                let low = words[word] >> shift;
                let high = if shift + BITS > 32 { words[word + 1] << (32 - shift) } else { 0 };
                *code = (low | high) as u8 & (u8::MAX >> (8 - BITS));
            }
        }
    }
}

/// Number of streams that are read together: the number of words in a cache line.
pub(super) const MOST: usize = 16;

/// Returns word `index` of little-endian bytes.
pub(super) fn word_at(bytes: &[u8], index: usize) -> u32 {
    u32::from_le_bytes(bytes[4 * index..][..4].try_into().expect("four bytes"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dtype::Dtype;

    #[test]
    fn codes_are_read_from_any_bit_offset() {
        let bytes: Vec<u8> = (0..2 * 5 * 8 * 4).map(|i: u32| (i.wrapping_mul(2654435761) >> 13) as u8).collect();
        for bits in [2, 3, 4, 8] {
            let length = 5 * bits as usize;
            let shape = [2, length];
            let bytes = &bytes[..2 * length * 4];
            let words = Tensor { name: "w", dtype: Dtype::I32, shape: &shape, bytes, shard: 0, offset: 0 };
            // Consecutive streams, and interleaved streams.
            for strides in [[length, 1], [1, 2]] {
                let streams = Streams { words, strides, length, bits };
                let bit = |stream: usize, at: usize| {
                    let word = word_at(bytes, stream * strides[0] + at / 32 * strides[1]);
                    word >> (at % 32) & 1
                };
                for stream in 0..2 {
                    for index in 0..5 * BLOCK {
                        let code = (0..bits).map(|b| bit(stream, index * bits as usize + b as usize) << b).sum::<u32>();
                        assert_eq!(streams.get(stream, index), code);
                        let mut codes = [[0; BLOCK]; 1];
                        streams.read_block(stream, index / BLOCK, &mut codes);
                        assert_eq!(u32::from(codes[0][index % BLOCK]), code);
                    }
                }
            }
        }
    }

    #[test]
    fn minus_one_codes_are_restored_with_borrows() {
        for bits in [2, 3, 4, 8] {
            // The stored form of the codes 0, 1, 2, ...: each word minus 1 in each of its codes, with borrows.
            let (mask, per_word) = ((1u32 << bits) - 1, 32 / bits);
            let word = (0..per_word).map(|i| (i & mask) << (i * bits)).sum::<u32>();
            let ones = (0..per_word).map(|i| 1 << (i * bits)).sum::<u32>();
            if bits == 3 {
                continue;
            }
            let bytes = word.wrapping_sub(ones).to_le_bytes();
            let words = Tensor { name: "w", dtype: Dtype::I32, shape: &[1], bytes: &bytes, shard: 0, offset: 0 };
            let streams = Streams { words, strides: [1, 1], length: 1, bits };
            for i in 0..per_word {
                assert_eq!(streams.get_plus_one(0, i as usize), i & mask, "{bits} bits");
            }
        }
    }
}
