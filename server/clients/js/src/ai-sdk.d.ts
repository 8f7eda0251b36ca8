import type { LanguageModelV3, ProviderV3 } from '@ai-sdk/provider';
import type { ClientOptions, Tidegate } from './index.js';

export interface TidegateProvider extends ProviderV3 {
  (modelId?: string): LanguageModelV3;
  languageModel(modelId?: string): LanguageModelV3;
  /** The client, for direct access to the sessions. */
  readonly client: Tidegate;
}

/** Creates the provider. With `ttlSeconds`, the sessions of conversations expire that long after their last use. */
export function createTidegate(options?: ClientOptions & { ttlSeconds?: number }): TidegateProvider;
